"""Whether a rank that was killed was killed for lack of memory, from what a user may read.

The kernel counts such ends in the process's cgroup, whoever's limit it was; where that cannot be read, it may stand in
its log. Slurm tells of its own limits in the job's log and in its accounting.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from slurm import scheduler
from slurm.scheduler import NoAnswer

SAID = "out of memory"
"""How an end record begins to say that memory ran out."""
UNKNOWN = "whether memory ran out cannot be told"

CGROUPS = Path("/sys/fs/cgroup")
KERNEL_LOG_S = 5.0
SACCT_S = 10.0
SLURM_SAYS = re.compile(r"^.*(?:oom[-_]kill event|exceeded memory limit|OOM Killed).*$", re.MULTILINE | re.IGNORECASE)
"""What slurmstepd and srun print of a step that was over its memory."""


def kernel_kills(process: str = "self") -> dict[Path, int]:
    """Ends for lack of memory that the kernel has counted in the cgroups of `process`, by file; empty: not readable.

    Source: `oom_kill` of memory.events (cgroup v2) and of memory.oom_control (v1), which count every kind of such ends.
    """
    found = {}
    for line in Path(f"/proc/{process}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files = [root / path.lstrip("/") / "memory.events" for root in (CGROUPS, CGROUPS / "unified")]
        elif "memory" in controllers.split(","):
            files = [CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"]
        else:
            continue
        for file in files:
            if (count := _count(file)) is not None:
                found[file] = count
    return found


def ended_by_kernel(pid: int, before: dict[Path, int], since: float) -> str | None:
    """Why process `pid`, a child that was killed, was: `SAID...`, `UNKNOWN...`, or None: not for lack of memory.

    before: `kernel_kills` when it started; since: CLOCK_MONOTONIC then, seconds.
    """
    now = kernel_kills()
    if grown := [file for file, count in now.items() if count > before.get(file, 0)]:
        return f"{SAID}: the kernel counted it in {grown[0]}"
    if now:
        return None
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=KERNEL_LOG_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return f"{UNKNOWN}: neither its cgroup nor the kernel's log can be read"
    for clock, line in re.findall(rf"^\[ *([\d.]+)\] (.*Killed process {pid} \(.*)$", log, re.MULTILINE):
        if float(clock) >= since:
            return f"{SAID}: the kernel's log says: {line}"
    return None


def ended_by_slurm(log: Path, job: str) -> str | None:
    """As `ended_by_kernel`, from the log of `job`, which slurmstepd writes to, and from the accounting."""
    if log.is_file() and (said := SLURM_SAYS.search(log.read_text(encoding="utf-8", errors="replace"))):
        return f"{SAID}: {said[0].strip()}"
    try:
        steps = scheduler.ask("sacct", "-n", "-P", "-j", job, "-o", "JobID,State", timeout_s=SACCT_S)
    except NoAnswer as silence:
        return f"{UNKNOWN}: {silence}"
    over = next((line for line in steps.splitlines() if line.endswith("|OUT_OF_MEMORY")), None)
    return f"{SAID}: Slurm says so of step {over.partition('|')[0]}" if over else None


def _count(file: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None
