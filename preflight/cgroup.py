"""What the kernel lets this process's control group have: a job step's own under Slurm, a container's elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from preflight.setting import proc, sys_folder


def memory_limit() -> int | None:
    """Bytes that this process's group and those above it may have at most, None where nothing limits them."""
    table = proc() / "self" / "cgroup"
    if not table.is_file():
        return None
    files = [file for line in table.read_text().splitlines() for file in _files(line) if file.is_file()]
    told = [file.read_text().strip() for file in files]
    return min((int(text) for text in told if text != "max"), default=None)


def _files(line: str) -> Iterator[Path]:
    """Where a line of /proc/self/cgroup may have its limits, from the group up (cgroups(7)): 0 is v2, `memory` v1.

    In a container the path may be the host's, whose folders are not there; the root's file is then its own.
    """
    number, controllers, path = line.split(":", 2)
    if number == "0":
        root, name = sys_folder() / "fs" / "cgroup", "memory.max"
    elif "memory" in controllers.split(","):
        root, name = sys_folder() / "fs" / "cgroup" / "memory", "memory.limit_in_bytes"
    else:
        return
    own = root / path.lstrip("/")
    yield from (folder / name for folder in (own, *own.parents) if folder.is_relative_to(root))
