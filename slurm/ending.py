"""How the run's last life ended, in one line: the job leaves it in `end.json`, status and diagnose read it."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from configs import runfolder
from slurm import records

ENDED_WELL = (0, runfolder.STOPPED)


@dataclass(frozen=True)
class Ending:
    """status: the job's. cause: one of `policy.CAUSES`. line: what it printed last."""

    attempt: int
    status: int
    cause: str
    line: str


def write(run: Path, status: int, cause: str, line: str) -> None:
    """Leave how this process's life ended, or, where it began none, that no other followed the run's last one.

    Where the folder does not take it, that is said: the line is printed too.
    """
    mine = runfolder.of_life(run)
    attempt = runfolder.current_attempt(run) if mine is None else runfolder.process_attempt()
    try:
        runfolder.write_json(run / runfolder.END, asdict(Ending(attempt, status, cause, line)), run=mine)
    except (runfolder.StaleAttempt, OSError) as error:
        print(f"{run / runfolder.END} cannot be written: {error}", file=sys.stderr, flush=True)


def bad(run: Path, attempt: int) -> Ending | None:
    """How life `attempt` ended, where it ended badly and could say so. Raises Damaged."""
    path = run / runfolder.END
    found = records.read(path, Ending) if path.is_file() else None
    return None if found is None or found.attempt != attempt or found.status in ENDED_WELL else found
