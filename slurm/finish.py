"""`python -m slurm.finish RUN OUTCOME`: what became of the job, in one line and one exit status, and what follows.

The causes come from the run folder, because what Slurm and submitit say is not enough: with `--kill-on-bad-exit` srun
answers 143 whatever the culprit's status was, and submitit's local executor answers 0. A run is complete when every
rank ended well and `result.json` is there. Whether a Slurm job begins again, and where, is `slurm.policy`'s.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from configs import runfolder
from configs.compose import from_run
from configs.console import make_app
from configs.console import run as run_app
from configs.schema import Config
from prefix_train import heartbeat
from prefix_train.heartbeat import End
from slurm import (
    acts,
    causes,
    diagnose,
    ending,
    evidence,
    launch,
    life,
    memory,
    policy,
    presence,
    scheduler,
    unequal,
    verdict,
)
from slurm.launch import Said
from slurm.policy import Cause, Life
from slurm.presence import Presence
from slurm.scheduler import NoAnswer

GATE_FAILED = 78
"""Exit status of a job whose nodes were found unfit: training never started."""
HUNG = 79
"""Exit status of a job that a watcher ended because a rank was stuck."""
FAILED = 1
ENDED_WELL = (0, runfolder.STOPPED)
"""Exit statuses of ranks that did what they were asked: finish, or save and stop."""
AGAIN = "; begins again "
"""In a job's last line, before why another life follows."""

WORD_S = 5.0
"""How long the word of a rank that was killed may take: its node's watcher writes it."""


class Outcome(NamedTuple):
    """How a job ended. ranks: those that the cause points to."""

    status: int
    line: str
    cause: Cause = "unknown"
    ranks: tuple[int, ...] = ()


def conclude(run: Path, srun_status: int, per_node: int | None = None) -> Outcome:
    """Judge a job whose ranks have ended, `srun_status` being what their launcher answered.

    The exit status is that of the rank that failed first, or of the launcher where no rank left a record; a hang has
    its own; without a result nothing counts as success. per_node: ranks per node, where nodes can fail alone.
    """
    attempt = runfolder.current_attempt(run)
    found = _judge(run, srun_status, per_node, attempt)
    if not (lost := presence.lost(run, attempt)):
        return found
    line, sep, advice = found.line.partition("; to go on")
    return found._replace(line=f"{line}; {_unwatched(lost)}{sep}{advice}")


def _judge(run: Path, srun_status: int, per_node: int | None, attempt: int) -> Outcome:
    if hang := verdict.decisive(run, attempt):
        named = (beat.rank for beat in heartbeat.read(run) if beat.attempt == attempt and beat.host in hang.nodes)
        cause = causes.OF_VERDICT.get(hang.kind, "hang")
        return Outcome(HUNG, f"stuck: {hang.sentence}", cause, hang.ranks or tuple(named))
    ends = [end for end in heartbeat.read_ends(run) if end.attempt == attempt]
    if per_node and (lost := _lost_ranks(ends, per_node)):
        return _node_lost(lost, srun_status, ends)
    if failed := sorted((end for end in ends if end.status not in ENDED_WELL), key=causes.order):
        return _by_rings(run, attempt, failed[0], _failed(failed, ends))
    silent = _silent(ends)
    if (srun_status or silent) and (fault := _unwritable(run)):
        return Outcome(srun_status or FAILED, f"failed: {fault}", "setup")
    if srun_status and not ends and not any(beat.attempt == attempt for beat in heartbeat.read(run)):
        return Outcome(srun_status, f"failed: no rank was started: srun ended with status {srun_status}", "launch")
    if srun_status:
        return Outcome(srun_status, f"failed: the ranks' launcher ended with status {srun_status}")
    if silent:
        return Outcome(FAILED, f"failed: rank {silent[0]} left no word of how it ended")
    if any(end.status == runfolder.STOPPED for end in ends):
        return Outcome(runfolder.STOPPED, f"stopped as asked, with a checkpoint; {resume(run)}", "stopped")
    if not (run / runfolder.RESULT).is_file():
        return Outcome(FAILED, f"failed: all ranks ended well, but there is no {runfolder.RESULT}")
    return Outcome(0, f"complete{_answered(run)}; {run / runfolder.RESULT}", "complete")


def _failed(failed: Sequence[End], ends: Sequence[End]) -> Outcome:
    """Judge by the records of the ranks that ended badly, first causes first; `ends`: of all ranks."""
    first = failed[0]
    cause, ranks = causes.of(first), tuple[int, ...]()
    if cause in ("died", "unwatched"):
        ranks = (first.rank,)
    if cause == "network":
        host = causes.suspect(failed, causes.addresses)
        ranks = tuple(end.rank for end in ends if end.host == host)
    mistake = causes.mistake(first)
    line = f"failed: {_sentence(first)}" if mistake is None else f"error: {mistake}"
    return Outcome(_status(first), line, cause, ranks)


def _by_rings(run: Path, attempt: int, first: End, found: Outcome) -> Outcome:
    """`found`, with what the ranks' collectives say: where these do not fit, gloo may end an innocent rank."""
    if not _may_not_fit(first) or not evidence.answered(evidence.of_end(run, attempt)):
        return found
    try:
        told = diagnose.of_life(run, attempt)
    except evidence.BadEvidence as error:
        return found._replace(line=f"{found.line}; what its watchers saw cannot be read: {error}")
    if told is None or told.kind not in unequal.KINDS.values():
        return found
    return found._replace(line=f"{found.line}; {told.sentence}", ranks=told.ranks)


def _may_not_fit(end: End) -> bool:
    return unequal.odd(end) or causes.lost_connections(end)


def act_failed(run: Path, name: str, status: int) -> Outcome:
    """Judge a job that ended before its ranks started, because the act `name` ended with `status`."""
    if name != acts.GATE:
        line = f"failed: {name} ended with status {status}; training did not start"
        return Outcome(status, line, "mistake" if status == FAILED + 1 else "setup")
    report = run / runfolder.PREFLIGHT / str(runfolder.current_attempt(run)) / "report.txt"
    found = report.read_text(encoding="utf-8").splitlines() if report.is_file() else []
    reason = found[0] if found else "preflight gave no report"
    return Outcome(GATE_FAILED, f"failed: preflight: {reason}; training did not start; see {report}", "gate")


def decide(run: Path, config: Config, ended: Outcome) -> tuple[Outcome, Life | None]:
    """What follows on Slurm, written down: the outcome with it in its line, and the life that another one follows.

    Raises StaleAttempt in a life that is not the run's present one, OSError where the run folder cannot be written.
    """
    runfolder.check_attempt(run)
    lives = life.read(run)
    if not lives or lives[-1].attempt != runfolder.process_attempt():
        return ended, None  # what comes before the life's beginning failed
    mine = lives[-1]
    named = _nodes_of(ended.ranks, mine.nodes, config)
    culprits = _unfit(run, mine.nodes, named) if ended.cause == "gate" else named
    update = life.reached(run, mine.attempt)
    mine = replace(mine, cause=ended.cause, update=update, culprits=culprits)
    exclude_unfit = config.preflight.on_bad_node == "exclude"
    decision = policy.decide([*lives[:-1], mine], config.slurm.max_requeues, exclude_unfit)
    mine = replace(mine, excluded=decision.exclude)
    life.write(run, mine, decision.why)
    line = ended.line.partition("; to go on")[0]
    if decision.again:
        return ended._replace(line=f"{line}{AGAIN}{decision.why}"), mine
    if ended.cause in policy.WHY_STOP and not (ended.cause == "gate" and exclude_unfit):
        return ended, None
    return ended._replace(line=f"{line}; not again: {decision.why}; {resume(run)}"), None


def begin_again(run: Path, mine: Life) -> str | None:
    """Have Slurm begin the job anew; what it answers if it does not, with the way to go on by hand."""
    try:
        scheduler.requeue(mine.job, life.without(run, life.read(run)))
    except NoAnswer as silence:
        return f"could not begin again: {silence}; {resume(run)}"
    return None


def interrupted(run: Path, ended: Outcome, number: int) -> Outcome:
    """`ended`, said as what it is where signal `number` (0: none) asked this job to end.

    A rank that failed by itself, as in saving, keeps its own line.
    """
    if not number or ended.cause not in ("stopped", "killed", "died", "network", "unknown"):
        return ended
    update = life.reached(run, runfolder.current_attempt(run))
    where = f"in update {update}" if update else "before training"
    status = runfolder.STOPPED if ended.status == runfolder.STOPPED else 128 + number
    return Outcome(status, f"interrupted {where}; {saved(run)}; {resume(run)}", "stopped")


def saved(run: Path) -> str:
    """How far the run is saved, in words; whether the checkpoint is whole is seen when it is read."""
    names = (path.name for path in (run / runfolder.CHECKPOINTS).glob("update-*"))
    updates = [int(name.removeprefix("update-")) for name in names if name.removeprefix("update-").isdecimal()]
    return f"saved after update {max(updates)}" if updates else "nothing is saved yet"


def resume(run: Path) -> str:
    """How to go on with a run by hand."""
    return f"to go on: {shlex.join(['python', '-m', 'slurm.submit', str(run)])}"


def wait_for_words(run: Path, seconds: float, nodes: int) -> None:
    """Give watchers the time to write how killed ranks ended, and all `nodes` of them what the ranks' collectives were
    where these may be the cause.
    """
    deadline, attempt = time.monotonic() + seconds, runfolder.process_attempt()
    while time.monotonic() < deadline:
        ends = [end for end in heartbeat.read_ends(run) if end.attempt == attempt]
        unseen = any(map(_may_not_fit, ends)) and len(evidence.answered(evidence.of_end(run, attempt))) < nodes
        if ends and not _silent(ends) and not unseen:
            return
        time.sleep(0.1)


def _answered(run: Path) -> str:
    result = runfolder.read_json(run / runfolder.RESULT)
    if "accuracy" not in result:
        return ""
    chance = result.get("chance")
    return f": answered exactly {result['accuracy']:.1%}" + ("" if chance is None else f" (chance {chance:.0%})")


def _silent(ends: list[End]) -> list[int]:
    """Ranks that have not said how they ended."""
    return sorted({*range(ends[0].world if ends else 1)} - {end.rank for end in ends})


def _lost_ranks(ends: list[End], per_node: int) -> tuple[int, ...]:
    """Ranks of nodes none of whose ranks has left a word, while ranks of other nodes have."""
    if not ends:
        return ()
    silent, world = set(_silent(ends)), ends[0].world
    nodes = [range(first, first + per_node) for first in range(0, world, per_node)]
    return tuple(rank for node in nodes if silent.issuperset(node) for rank in node)


def _node_lost(lost: tuple[int, ...], srun_status: int, ends: list[End]) -> Outcome:
    worst = next((end for end in sorted(ends, key=causes.order) if end.status not in ENDED_WELL), None)
    said = f"; {_sentence(worst)}" if worst else ""
    line = f"failed: rank {lost[0]} fell silent together with the watcher of its node{said}"
    return Outcome(srun_status or FAILED, line, "node", lost)


def _nodes_of(ranks: Iterable[int], nodes: tuple[str, ...], config: Config) -> tuple[str, ...]:
    return tuple(dict.fromkeys(nodes[rank // config.slurm.tasks_per_node] for rank in ranks))


def _unfit(run: Path, nodes: tuple[str, ...], named: tuple[str, ...]) -> tuple[str, ...]:
    """This job's nodes that preflight's report finds at fault, and those that no step could be started on: `named`.

    Where there are such, srun has ended the step on the others too, and their silence says nothing.
    """
    path = run / runfolder.PREFLIGHT / str(runfolder.current_attempt(run)) / "report.json"
    report = runfolder.read_json(path) if path.is_file() else {"bad_nodes": [], "problems": []}
    silent = {problem["node"] for problem in report["problems"] if problem["finding"]["check"] == "node.answer"}
    bad = {*report["bad_nodes"]} - silent if named else {*report["bad_nodes"]}
    return tuple(node for node in nodes if node in bad or node in named)


def _unwritable(run: Path) -> str | None:
    """Why nobody can have left a word in the run folder; None: it can be written."""
    if not run.is_dir():
        return f"the run folder {run} is gone"
    try:
        runfolder.write_text(run / ".written", " " * 4096)
        (run / ".written").unlink()
    except OSError as error:
        return f"the run folder {run} cannot be written: {error.strerror}"
    return None


def _unwatched(lost: Sequence[Presence]) -> str:
    first = lost[0]
    when = time.strftime("%F %T", time.localtime(first.gone))
    return f"the watcher of {first.host} had died: from {when} on nobody watched that node"


def _status(end: End) -> int:
    if end.signal is not None:
        return 128 + int(signal.Signals[end.signal])
    return end.status or FAILED


def _sentence(end: End) -> str:
    when = f" in update {end.update}" if end.update else ""
    if end.signal:
        why = f": {end.message}" if end.message else ""
        return f"rank {end.rank} on {end.host} was ended by {end.signal}{when}{why}"
    if end.exception:
        message = " ".join((end.message or "").split())
        if causes.of(end) == "unwatched":
            return f"rank {end.rank} on {end.host} was not started: {message}"
        return f"rank {end.rank} on {end.host} raised {end.exception}{when} at {end.where}: {message}"
    return f"rank {end.rank} on {end.host} ended with status {end.status}{when}"


app = make_app("Judge a finished job. Called by the job, not by people. Example: python -m slurm.finish runs/demo-1 0")


@app.command()
def main(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    outcome: Annotated[str, typer.Argument(help="Exit status of the ranks' launcher, or NAME:STATUS of a failed act.")],
) -> int:
    """Print how the job ended, have it begin again where that follows, and exit with the status it shall have."""
    scheduler.outlive_requeue()
    try:
        ended, again = _end(run, outcome)
    except (runfolder.StaleAttempt, OSError) as error:
        ended, again = Outcome(FAILED, f"failed: {error}"), None
    ending.write(run, ended.status, ended.cause, ended.line)
    print(ended.line, file=sys.stdout if ended.status == 0 else sys.stderr, flush=True)
    if again is not None and (refused := begin_again(run, again)):
        print(refused, file=sys.stderr, flush=True)
        ending.write(run, ended.status, ended.cause, f"{ended.line.partition(AGAIN)[0]}; {refused}")
    return ended.status


def _end(run: Path, outcome: str) -> tuple[Outcome, Life | None]:
    config, (name, _, status) = from_run(run), outcome.rpartition(":")
    if name:
        ended = act_failed(run, name, int(status))
        if runfolder.of_life(run) is None:
            return ended, None  # what comes before the life's beginning failed
        return decide(run, config, ask_slurm(run, ended, config.slurm.tasks_per_node))
    if int(status):
        wait_for_words(run, WORD_S + config.watch.poll_s, config.slurm.nodes)
    per_node = config.slurm.tasks_per_node if config.slurm.nodes > 1 else None
    return decide(run, config, ask_slurm(run, conclude(run, int(status), per_node), config.slurm.tasks_per_node))


def ask_slurm(run: Path, ended: Outcome, per_node: int = 1) -> Outcome:
    """What Slurm knows besides: where and why preflight, or ranks, `per_node` on each node, were not started; which
    memory limit ended one.
    """
    log = run / runfolder.LOGS / f"job-{os.environ['SLURM_JOB_ID']}.log"
    if ended.cause not in ("gate", "launch"):
        return _over_memory(ended, log)
    said = launch.read(log)
    if ended.cause == "gate" and not said.nodes:
        return ended  # of a node that preflight found unfit srun says no more than that its step failed
    return _not_started(ended, said, per_node, life.read(run))


def _not_started(ended: Outcome, said: Said, per_node: int, lives: Sequence[Life]) -> Outcome:
    """`ended` with what srun said, and the ranks of the nodes that it named."""
    named = [index for index, node in enumerate(lives[-1].nodes if lives else ()) if node in said.nodes]
    ranks = tuple(rank for index in named for rank in range(index * per_node, (index + 1) * per_node))
    told = f"; srun says: {said.line}" if said.line else ""
    return ended._replace(line=f"{ended.line}{told}", ranks=ranks)


def _over_memory(ended: Outcome, log: Path) -> Outcome:
    """A rank that was killed may have been over the memory that Slurm gave the job: no fault of its node."""
    if ended.cause != "died" or ended.status != 128 + signal.SIGKILL:
        return ended
    said = memory.ended_by_slurm(log, scheduler.job_id(os.environ))
    if said is None:
        return ended
    known = said.startswith(memory.SAID)
    if not known and memory.UNKNOWN not in ended.line:
        return ended  # the kernel has told, and Slurm's silence adds nothing
    line = ended.line.partition(f": {memory.UNKNOWN}")[0]
    return ended._replace(
        line=f"{line}: {said}", cause="memory" if known else "died", ranks=() if known else ended.ranks
    )


if __name__ == "__main__":
    run_app(app)
