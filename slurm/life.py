"""`python -m slurm.life RUN`: a job begins a life in its run folder, so that no process of an earlier one writes there.

On Slurm a life is what a requeue starts, numbered by Slurm's restart count. On one machine each start is a life.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from configs import runfolder
from configs.console import make_app
from configs.console import run as run_app

VARIABLE = "PREFIX_TRAIN_ATTEMPT"


def begin(run: Path, attempt: int) -> None:
    """Make `attempt` the run's present life. Raises StaleAttempt where a later one has begun."""
    now = runfolder.current_attempt(run)
    if attempt < now:
        raise runfolder.StaleAttempt(f"attempt {attempt} may not begin in {run}: the job is in attempt {now}")
    runfolder.write_text(run / runfolder.ATTEMPT, f"{attempt}\n")


def begin_next(run: Path) -> int:
    """Begin the life after the last one; returns its number, which is also put into this process's environment."""
    attempt = runfolder.current_attempt(run) + 1 if (run / runfolder.ATTEMPT).exists() else 0
    os.environ[VARIABLE] = str(attempt)
    begin(run, attempt)
    return attempt


app = make_app("Begin a life of a job. Called by the job, not by people. Example: python -m slurm.life runs/demo-1")


@app.command()
def main(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> int:
    """Make this process's attempt the run's present life."""
    begin(run, runfolder.process_attempt())
    return 0


if __name__ == "__main__":
    run_app(app)
