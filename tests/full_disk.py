"""Commands on disks that are too small: a program, since it mounts them.

    full_disk.py DISK SIZES COMMAND ...     `prefix-train COMMAND ...` until it ends well; started in a mount namespace

DISK becomes a tmpfs of one after the other of SIZES, bytes with commas between them. Prints one JSON line for each.
Every command is a process of its own, forked from this one, which has imported everything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from configs.console import run
from prefix_train.cli import app
from prefix_train.exports import check as _imported  # noqa: F401
from prefix_train.exports import run as _imported_too  # noqa: F401
from tests.stream_faults import forked

ROOT = Path(__file__).parents[1]


def times(disk: Path, sizes: Iterable[int], *command: str | Path) -> list[dict[str, Any]]:
    """What became of `command` with each size of `disk`, up to the first with which it ended well."""
    namespace = ("unshare", *(["--mount"] if os.geteuid() == 0 else ["--map-root-user", "--mount"]))
    disk.mkdir()
    done = subprocess.run(
        [*namespace, sys.executable, __file__, str(disk), ",".join(map(str, sizes)), *map(str, command)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(disk)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def main(disk: Path, sizes: list[str], command: list[str]) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "none", disk], check=True)
    for size in sizes:
        subprocess.run(["mount", "-o", f"remount,size={size}", disk], check=True)
        status, printed = forked(lambda: run(app, command))
        left = sorted(path.name for path in disk.iterdir())
        print(json.dumps({"size": int(size), "status": status, "printed": printed, "left": left}), flush=True)
        if status == 0:
            break


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:])
