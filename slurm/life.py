"""`python -m slurm.life RUN`: a job begins a life in its run folder, so that no process of an earlier one writes there.

Each start of a job is a life: the first, what a requeue starts, and on one machine every local start. On Slurm each
life leaves lives/<n>.json: where it ran, how it ended, and what followed. A life that could not say how it ended (its
first node died, Slurm requeued the job) is judged by the next.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from configs import runfolder
from configs.compose import from_run
from configs.console import make_app
from configs.console import run as run_app
from configs.errors import UserError
from prefix_train import heartbeat
from slurm import policy, records, scheduler
from slurm.policy import Life
from slurm.scheduler import NoAnswer

VARIABLE = "PREFIX_TRAIN_ATTEMPT"

NOT_AGAIN = 1
"""Exit status of a job that Slurm began again although its last life says that it shall not be."""
CLOCKS_S = 60.0
"""How far the clocks of Slurm and of the run folder's file server may be apart."""
MAX_MOVES = 2
"""How often a job asks for other nodes before it takes what it gets."""


def begin(run: Path, attempt: int) -> None:
    """Make `attempt` the run's present life. Raises StaleAttempt where a later one has begun.

    How a job ended that began no life is not how this one does: its word goes.

    UserError where the run folder cannot be written: nobody could leave a word in it later.
    """
    now = runfolder.current_attempt(run)
    if attempt < now:
        raise runfolder.StaleAttempt(f"attempt {attempt} may not begin in {run}: the job is in attempt {now}")
    try:
        runfolder.write_text(run / runfolder.ATTEMPT, f"{attempt}\n")
        (run / runfolder.END).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"the run folder {run} cannot be written: {error.strerror}: put that right first") from error


def begin_next(run: Path) -> int:
    """Begin the life after the last one; returns its number, which is also put into this process's environment."""
    attempt = runfolder.current_attempt(run) + 1 if (run / runfolder.ATTEMPT).exists() else 0
    os.environ[VARIABLE] = str(attempt)
    begin(run, attempt)
    return attempt


def read(run: Path) -> list[Life]:
    """All lives of a Slurm job, oldest first. Raises Damaged."""
    paths = [path for path in (run / runfolder.LIVES).glob("*.json") if path.stem.isdecimal()]
    return [records.read(path, Life) for path in sorted(paths, key=lambda path: int(path.stem))]


def write(run: Path, life: Life, why: str = "") -> None:
    """Leave what is known of `life`. Raises StaleAttempt in a process of an earlier life than the present one."""
    document = {**asdict(life), "why": why}
    runfolder.write_json(run / runfolder.LIVES / f"{life.attempt}.json", document, run=run)


def reached(run: Path, attempt: int) -> int:
    """The update that life `attempt` was at when its ranks last said so."""
    return max((beat.update for beat in heartbeat.read(run) if beat.attempt == attempt), default=0)


def begin_job(run: Path) -> int | None:
    """Begin a Slurm job's next life and return its number; None where the job shall not or cannot begin.

    What follows from the life before is done here if nobody was left to do it, and nodes that were found to be at
    fault are moved away from.
    """
    lives, job = read(run), scheduler.job_id(os.environ)
    if lives and lives[-1].cause is None:
        lives[-1], decision = _judge_last(run, lives)
        write(run, lives[-1], decision.why)
        if not decision.again and lives[-1].job == job:
            print(f"failed: the job ends here: {decision.why}", file=sys.stderr)
            return None
    nodes = scheduler.job_nodes()
    bad = [node for node in policy.excluded(lives) if node in nodes]
    moves = int(os.environ.get("SLURM_RESTART_COUNT", "0")) - sum(life.job == job for life in lives)
    if bad and moves < MAX_MOVES and _move(run, job, lives, bad):
        return None
    attempt = begin_next(run)
    write(run, Life(attempt, job, nodes))
    return attempt


def without(run: Path, lives: Sequence[Life]) -> tuple[str, ...]:
    """What ExcNodeList has to hold: the user's own exclusions, and of the nodes at fault those that can be left out.

    Raises NoAnswer.
    """
    slurm = from_run(run).slurm
    given, bad = (slurm.exclude,) if slurm.exclude else (), policy.excluded(lives)
    if bad and slurm.nodelist:
        print(f"{', '.join(bad)} cannot be left out: slurm.nodelist says where to run", file=sys.stderr)
        return given
    if not bad:
        return given
    out = policy.bearable(bad, scheduler.partition_nodes() - {*scheduler.names(*given)}, slurm.nodes)
    if kept := [node for node in bad if node not in out]:
        print(f"{', '.join(kept)} cannot be left out: too few other nodes are up", file=sys.stderr)
    return (*given, *out)


def _judge_last(run: Path, lives: Sequence[Life]) -> tuple[Life, policy.Decision]:
    """The last life with its cause, and what follows."""
    last, config = lives[-1], from_run(run)
    try:
        dead = scheduler.dead_nodes(last.nodes, _began(run, last) - CLOCKS_S)
    except NoAnswer as silence:
        print(f"which of the last life's nodes are down is not known: {silence}", file=sys.stderr)
        dead = ()
    last = replace(last, cause="node" if dead else "killed", culprits=dead, update=reached(run, last.attempt))
    decision = policy.decide([*lives[:-1], last], config.slurm.max_requeues, exclude_unfit=False)
    return replace(last, excluded=decision.exclude), decision


def _began(run: Path, life: Life) -> float:
    """Seconds since 1970: what is known of a life that nobody could end was written when it began."""
    return (run / runfolder.LIVES / f"{life.attempt}.json").stat().st_mtime


def _move(run: Path, job: str, lives: Sequence[Life], bad: Sequence[str]) -> bool:
    """Have Slurm begin the job anew on other nodes; False where there are too few, or it does not answer."""
    try:
        out = without(run, lives)
        if not set(bad) & set(out):
            return False
        print(f"begins again elsewhere: {', '.join(bad)} had been found to be at fault", file=sys.stderr, flush=True)
        scheduler.requeue(job, out)
    except NoAnswer as silence:
        print(f"goes on with {', '.join(bad)}: {silence}", file=sys.stderr)
        return False
    return True


app = make_app("Begin a life of a job. Called by the job, not by people. Example: python -m slurm.life runs/demo-1")


@app.command()
def main(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> int:
    """Print the number of the life that begins."""
    scheduler.outlive_requeue()
    attempt = begin_job(run)
    if attempt is None:
        return NOT_AGAIN
    print(attempt)
    return 0


if __name__ == "__main__":
    run_app(app)
