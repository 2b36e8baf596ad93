"""`python -m slurm.finish RUN OUTCOME`: what became of the job, in one line and one exit status.

The causes come from the run folder, because what Slurm and submitit say is not enough: with `--kill-on-bad-exit` srun
answers 143 whatever the culprit's status was, and submitit's local executor answers 0. A run is complete when every
rank ended well and `result.json` is there.
"""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from configs import runfolder
from configs.console import make_app
from configs.console import run as run_app
from prefix_train import heartbeat
from slurm import acts, verdict

GATE_FAILED = 78
"""Exit status of a job whose nodes were found unfit: training never started."""
HUNG = 79
"""Exit status of a job that a watcher ended because a rank was stuck."""
FAILED = 1
ENDED_WELL = (0, runfolder.STOPPED)
"""Exit statuses of ranks that did what they were asked: finish, or save and stop."""


class Outcome(NamedTuple):
    """How a job ended."""

    status: int
    line: str


def conclude(run: Path, srun_status: int) -> Outcome:
    """Judge a job whose ranks have ended, `srun_status` being what their launcher answered.

    The exit status is that of the rank that failed first, or of the launcher where no rank left a record; a hang has
    its own; without a result nothing counts as success.
    """
    attempt = runfolder.current_attempt(run)
    if hang := verdict.latest(run, attempt):
        return Outcome(HUNG, f"stuck: {hang}")
    ends = [end for end in heartbeat.read_ends(run) if end.attempt == attempt]
    if failed := sorted((end for end in ends if end.status not in ENDED_WELL), key=lambda end: end.time):
        return Outcome(_status(failed[0]), f"failed: {_sentence(failed[0])}")
    if srun_status:
        return Outcome(srun_status, f"failed: the ranks' launcher ended with status {srun_status}")
    silent = sorted({*range(ends[0].world if ends else 1)} - {end.rank for end in ends})
    if silent:
        return Outcome(FAILED, f"failed: rank {silent[0]} left no word of how it ended")
    if any(end.status == runfolder.STOPPED for end in ends):
        script = shlex.quote(str(run / runfolder.SUBMIT_SCRIPT))
        return Outcome(runfolder.STOPPED, f"stopped as asked, with a checkpoint; to go on: bash {script}")
    if not (run / runfolder.RESULT).is_file():
        return Outcome(FAILED, f"failed: all ranks ended well, but there is no {runfolder.RESULT}")
    return Outcome(0, "complete")


def act_failed(run: Path, name: str, status: int) -> Outcome:
    """Judge a job that ended before its ranks started, because the act `name` ended with `status`."""
    if name != acts.GATE:
        return Outcome(status, f"failed: {name} ended with status {status}; training did not start")
    report = run / runfolder.PREFLIGHT / str(runfolder.current_attempt(run)) / "report.txt"
    found = report.read_text(encoding="utf-8").splitlines() if report.is_file() else []
    reason = found[0] if found else "preflight gave no report"
    return Outcome(GATE_FAILED, f"failed: preflight: {reason}; training did not start; see {report}")


def _status(end: heartbeat.End) -> int:
    if end.signal is not None:
        return 128 + int(signal.Signals[end.signal])
    return end.status or FAILED


def _sentence(end: heartbeat.End) -> str:
    when = f" in update {end.update}" if end.update else ""
    if end.signal:
        return f"rank {end.rank} on {end.host} was ended by {end.signal}{when}"
    if end.exception:
        message = " ".join((end.message or "").split())
        return f"rank {end.rank} on {end.host} raised {end.exception}{when} at {end.where}: {message}"
    return f"rank {end.rank} on {end.host} ended with status {end.status}{when}"


app = make_app("Judge a finished job. Called by the job, not by people. Example: python -m slurm.finish runs/demo-1 0")


@app.command()
def main(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    outcome: Annotated[str, typer.Argument(help="Exit status of the ranks' launcher, or NAME:STATUS of a failed act.")],
) -> int:
    """Print how the job ended and exit with the status that the job shall have."""
    name, _, status = outcome.rpartition(":")
    ended = act_failed(run, name, int(status)) if name else conclude(run, int(status))
    print(ended.line, file=sys.stdout if ended.status == 0 else sys.stderr, flush=True)
    return ended.status


if __name__ == "__main__":
    run_app(app)
