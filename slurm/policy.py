"""What follows when a life of a job has ended: an end, or another life, with or without some nodes. Pure.

A life that fails for a reason that lies in the run itself would fail again, so it is not followed by another. Where
the reason may lie in a node, that node is left out; a lost connection and a straggler are given one more chance first.
No run comes back more than `max_requeues` times after failures, nor twice from the same failure at the same update, nor
at all from a life that got nowhere before its time was up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Cause = Literal[
    "complete",  # the result is there
    "stopped",  # asked to stop by the time limit or a preemption, and saved
    "killed",  # ended from outside before anything could be said: preempted without grace, requeued by hand
    "node",  # a node failed, or fell silent with its ranks and its watcher
    "hang",  # a watcher found the run stuck
    "died",  # a signal ended a rank
    "unwatched",  # no watcher started on a node
    "launch",  # no rank was started
    "network",  # every rank has reported, and all they report is lost connections
    "straggler",  # a watcher found the run held up by a rank that is much slower than the others
    "gate",  # preflight found nodes unfit
    "memory",  # out of memory, the kernel's and Slurm's own kills included
    "nan",  # a loss or gradient that is not finite
    "mistake",  # a user's mistake: bad input, an impossible option
    "raised",  # an exception in the trainer, a bad result included
    "setup",  # what comes before preflight and training failed
    "unknown",  # nothing says why
]
CAUSES: tuple[str, ...] = get_args(Cause)

FAILURES = frozenset({"node", "hang", "died", "unwatched", "launch", "network", "straggler"})
"""Causes that may lie outside the run, and that count against `slurm.max_requeues`."""
PASSING = frozenset({"network", "straggler"})
"""Failures that often pass by themselves: no node is left out until the same happens again."""

WHY_STOP: dict[str, str] = {
    "complete": "the run is complete",
    "gate": "preflight found nodes unfit",
    "memory": "out of memory: it would be again",
    "nan": "a loss or gradient is not finite: it would be again",
    "mistake": "a mistake in the run: it has to be put right first",
    "raised": "the trainer failed: it would again",
    "setup": "the job could not get ready: it would fail again",
    "unknown": "nothing says why it failed",
}


@dataclass(frozen=True)
class Life:
    """One life of a job, from its start to its end.

    update: the update that was being done, or that the run had reached. culprits: nodes that the cause points to.
    excluded: nodes that lives after this one leave out because of it. cause None: nobody has said how it ended.
    """

    attempt: int
    job: str
    nodes: tuple[str, ...]
    cause: Cause | None = None
    update: int = 0
    culprits: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()


class Decision(NamedTuple):
    """What follows. exclude: nodes to leave out from now on, besides those already left out."""

    again: bool
    exclude: tuple[str, ...]
    why: str


def excluded(lives: Iterable[Life]) -> tuple[str, ...]:
    """All nodes that were found to be at fault, in the order in which they were."""
    return tuple(dict.fromkeys(node for life in lives for node in life.excluded))


def decide(lives: Sequence[Life], max_requeues: int, exclude_unfit: bool) -> Decision:
    """What follows the last of `lives`, which has ended and whose cause is known; lives of other jobs do not count.

    exclude_unfit: `preflight.on_bad_node` is `exclude`.
    """
    last = lives[-1]
    before = [life for life in lives[:-1] if life.job == last.job]
    if last.cause is None:
        raise ValueError(f"the cause of life {last.attempt} is not known")
    if last.cause == "stopped":
        return _after_stop(last, before)
    if last.cause == "killed":
        return _after_kill(last, before, max_requeues)
    if last.cause == "gate" and exclude_unfit:
        return _after_gate(last, before)
    if last.cause not in FAILURES:
        return Decision(False, (), WHY_STOP[last.cause])
    alike = [life for life in before if life.cause == last.cause]
    if any(life.update == last.update for life in alike):
        return Decision(False, (), f"the same failure twice at update {last.update}")
    if (failures := sum(life.cause in FAILURES for life in [*before, last])) > max_requeues:
        return Decision(False, (), f"{failures} failures are more than slurm.max_requeues={max_requeues}")
    if last.cause in PASSING and not alike:
        return Decision(True, (), "once on any nodes: it may have passed")
    blamed = last.culprits if len(last.culprits) < max(2, len(last.nodes)) else ()
    if last.cause in PASSING and not blamed:
        return Decision(False, (), f"{last.cause} twice, and no node can be named")
    return Decision(True, blamed, f"without {', '.join(blamed)}" if blamed else "on any nodes")


def bearable(bad: Sequence[str], up: Iterable[str], needed: int) -> tuple[str, ...]:
    """Those of the nodes `bad` that can be left out where `needed` of the nodes `up` have to remain; the newest first.

    A job that can run nowhere would wait for ever: better on nodes that have been at fault again.
    """
    left, kept = set(up), set[str]()
    for node in reversed(bad):
        if len(left - {node}) >= needed:
            left.discard(node)
            kept.add(node)
    return tuple(node for node in bad if node in kept)


def _after_stop(last: Life, before: Sequence[Life]) -> Decision:
    if before and before[-1].cause == "stopped" and before[-1].update >= last.update:
        return Decision(False, (), f"a whole life brought no update: it is still at {last.update}; give more time")
    return Decision(True, (), f"from update {last.update}")


def _after_kill(last: Life, before: Sequence[Life], patience: int) -> Decision:
    """Nobody is to blame; but a run that is ended again and again before it comes further ends for good."""
    if (vain := _in_vain([*before, last])) >= max(2, patience):
        return Decision(False, (), f"ended from outside, and {vain} lives in a row came no further than before")
    return Decision(True, (), "from its newest checkpoint")


def _in_vain(lives: Sequence[Life]) -> int:
    """How many of the last lives in a row came no further than those before them."""
    best, vain = -1, 0
    for life in lives:
        best, vain = max(best, life.update), 0 if life.update > best else vain + 1
    return vain


def _after_gate(last: Life, before: Sequence[Life]) -> Decision:
    if any(life.cause == "gate" for life in before):
        return Decision(False, (), "preflight found nodes unfit a second time")
    if not last.culprits or len(last.culprits) == len(last.nodes) > 1:
        return Decision(False, (), "preflight found no node fit" if last.culprits else WHY_STOP["gate"])
    return Decision(True, last.culprits, f"once, without {', '.join(last.culprits)}")
