"""Which nodes are tested with which, and what the ranks' answers say of each node. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.wording import counted
from preflight.states import Finding

SLOW = {"nccl": 0.5, "gloo": 0.25}
"""A pair is slow below this share of what the median node reaches at best; over TCP, load on a host counts too."""
MOST_SKEW_S = 2.0
THE_JOB = "the job"
"""Stands where a node would, for what no node is to blame for."""
NETWORK = "look at the node's network: cables, interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), firewall"


@dataclass(frozen=True)
class RankReport:
    """What one rank's collective test printed and how it ended.

    steps: its lines, `{"begin": stage}` before and `{"stage": stage, ...}` after each. status: of its program, None
    where the deadline ended it. error: the last line of an ending that was not good.
    """

    rank: int
    node: str
    steps: tuple[dict[str, Any], ...] = ()
    status: int | None = 0
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def stage(self, name: str) -> list[dict[str, Any]]:
        """All results of the stage `name`."""
        return [step for step in self.steps if step.get("stage") == name]

    @property
    def done(self) -> bool:
        """Whether the test came to its end."""
        return bool(self.stage("done"))

    @property
    def at(self) -> str:
        """The stage that it was in last."""
        return next((step["begin"] for step in reversed(self.steps) if "begin" in step), "start")


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Pairs of nodes, each node in two pairs with two others; pairs of one round share no node.

    The edges of a ring: an even one takes two rounds, an odd one a third for the last edge. Two nodes have one pair.
    """
    if nodes < 2:
        return []
    if nodes == 2:
        return [[(0, 1)]]
    ring = [(node, node + 1) for node in range(nodes - 1)]
    last = [(nodes - 1, 0)]
    return [ring[0::2], ring[1::2] + last] if nodes % 2 == 0 else [ring[0::2], ring[1::2], last]


def judge_ranks(
    reports: Sequence[RankReport], world: int, node_of: Mapping[int, str], floor_gib_s: float = 0.0
) -> list[tuple[str, Finding]]:
    """The ranks' answers -> findings by node; one that passes stands for all.

    world: ranks that should have answered. node_of: the node of each rank, for those that did not.
    """
    found = _never_joined(reports, world, node_of) or _ended_badly(reports) or _stuck(reports)
    if not found:
        found = [*_wrong_values(reports), *_clocks(reports), *_pairs(reports, floor_gib_s)]
    if found:
        return found
    nodes = sorted({report.node for report in reports})
    reached = [step["gib_s"] for report in reports for step in report.stage("pair") if "gib_s" in step]
    speed = f", pairs of nodes reach {min(reached):.2f} to {max(reached):.2f} GiB/s" if reached else ""
    passed = f"{counted(world, 'rank')} on {len(nodes)} node(s): right values over {_backend(reports)}{speed}"
    return [(nodes[0], Finding("collective.values", "pass", passed))]


def _backend(reports: Sequence[RankReport]) -> str:
    return next((step["backend"] for report in reports for step in report.stage("group")), "gloo")


def _never_joined(reports: Sequence[RankReport], world: int, node_of: Mapping[int, str]) -> list[tuple[str, Finding]]:
    """Ranks that left no answer, or that the others did not see at the rendezvous."""
    answered = {report.rank: report for report in reports}
    unseen = Counter(rank for report in reports for step in report.stage("join") for rank in step["missing"])
    outside = [report for report in reports if not report.stage("store")]
    lost = {rank for rank in range(world) if rank not in answered} | set(unseen)
    if not lost and outside:
        return _no_store(outside, len(reports))
    found = []
    for rank in sorted(lost):
        node = answered[rank].node if rank in answered else node_of.get(rank, "?")
        why = f": {answered[rank].error}" if rank in answered and answered[rank].error else ""
        said = f"rank {rank} never joined the collectives{why}; {world - len(lost)} of {world} ranks waited for it"
        found.append((node, Finding("collective.join", "silent", said, "look at that rank's log, and at its network")))
    return found


def _no_store(outside: Sequence[RankReport], total: int) -> list[tuple[str, Finding]]:
    """Who cannot reach rank 0: those ranks' nodes, or rank 0's where nobody else can."""
    if len(outside) >= total - 1 and total > 2:
        said = f"{len(outside)} ranks could not reach rank 0: {outside[0].error}"
        node = next((report.facts.get("master", report.node) for report in outside), "?")
        return [(str(node), Finding("collective.join", "fail", said, NETWORK))]
    return [
        (report.node, Finding("collective.join", "fail", f"rank {report.rank} could not reach rank 0: {report.error}",
                              NETWORK))
        for report in outside
    ]  # fmt: skip


def _ended_badly(reports: Sequence[RankReport]) -> list[tuple[str, Finding]]:
    """Ranks that were killed. What the others then raise is a consequence."""
    return [
        (report.node, Finding("collective.values", "fail",
                              f"rank {report.rank} was killed by signal {-report.status} in {report.at}",
                              "look at the node's kernel log"))
        for report in reports
        if report.status is not None and report.status < 0
    ]  # fmt: skip


def _stuck(reports: Sequence[RankReport]) -> list[tuple[str, Finding]]:
    """Ranks that came less far than those that waited for them; where all wait alike, nobody is blamed by name."""
    if all(report.done for report in reports):
        return []
    least, most = (pick(len(report.steps) for report in reports) for pick in (min, max))
    behind = [report for report in reports if len(report.steps) == least]
    if least == most:
        ends = Counter(report.error or "no answer in time" for report in reports).most_common(1)[0][0]
        said = f"all of {counted(len(reports), 'rank')} ended in {behind[0].at}: {ends}"
        return [(THE_JOB, Finding("collective.values", "broken", said, NETWORK))]
    found = []
    for report in behind:
        how = report.error if report.error and report.status else "did not go on in time"
        said = f"rank {report.rank} in {report.at}: {how}; the others waited for it"
        found.append((report.node, Finding("collective.values", "fail" if report.status else "silent", said, NETWORK)))
    return found


def _wrong_values(reports: Sequence[RankReport]) -> list[tuple[str, Finding]]:
    """Whose numbers are wrong: the rank that most others name, or the one that alone sees wrong ones."""
    node_of = {report.rank: report.node for report in reports}
    votes = Counter(
        rank
        for report in reports
        for step in report.stage("all_gather")
        for rank in step["wrong"]
        if rank != report.rank
    )
    named = [rank for rank, count in votes.items() if count >= max(1, (len(reports) - 1) / 2)]
    seeing = [(report, step["stage"]) for report in reports for step in report.steps if step.get("ok") is False]
    if named:
        return [
            (node_of[rank], Finding("collective.values", "fail", f"what rank {rank} sends arrives wrong at the others",
                                    "look at the node's memory and network"))
            for rank in named
        ]  # fmt: skip
    return [
        (report.node, Finding("collective.values", "fail", f"rank {report.rank} got wrong values in {stage}",
                              "look at the node's memory and network"))
        for report, stage in seeing
    ]  # fmt: skip


def _clocks(reports: Sequence[RankReport]) -> list[tuple[str, Finding]]:
    """Clocks read by all ranks behind one barrier."""
    read = {report.rank: step["wall"] for report in reports for step in report.stage("clock")}
    if len(read) < 2:
        return []
    middle = statistics.median(read.values())
    off = {report.node: read[report.rank] - middle for report in reports if report.rank in read}
    return [
        (node, Finding("host.clock", "fail", f"its clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} "
                       "the others'", "start time synchronisation (chronyd)"))
        for node, skew in off.items()
        if abs(skew) > MOST_SKEW_S
    ]  # fmt: skip


def _pairs(reports: Sequence[RankReport], floor_gib_s: float) -> list[tuple[str, Finding]]:
    """Pairs that failed or are slow; a node in two of them is at fault, else the link between two nodes is."""
    tests: dict[tuple[str, str], list[float]] = {}
    for report in reports:
        for step in report.stage("pair"):
            first, second = sorted((report.node, step["peer"]))
            tests.setdefault((first, second), []).append(0.0 if "error" in step else step["gib_s"])
    speeds = {pair: min(measured) for pair, measured in tests.items()}
    nodes = sorted({node for pair in speeds for node in pair})
    if not nodes:
        return []
    usual = statistics.median(max(speed for pair, speed in speeds.items() if node in pair) for node in nodes)
    least = max(SLOW[_backend(reports)] * usual, floor_gib_s)
    bad = {pair: speed for pair, speed in speeds.items() if speed < least or not speed}
    often = Counter(node for pair in bad for node in pair)
    guilty = [node for node in nodes if often[node] >= 2]
    found = []
    for node in guilty:
        others = ", ".join(_said(pair, node, speed) for pair, speed in bad.items() if node in pair)
        found.append((node, Finding("collective.pair", "fail", f"{others}; the median node reaches {usual:.2f} GiB/s",
                                    NETWORK)))  # fmt: skip
    for pair, speed in bad.items():
        if not set(pair) & set(guilty):
            said = f"{_said(pair, pair[0], speed)}; the median node reaches {usual:.2f} GiB/s"
            found += [
                (node, Finding("collective.link", "fail", f"{pair[0]}-{pair[1]}: {said}", NETWORK)) for node in pair
            ]
    return found


def _said(pair: tuple[str, str], node: str, speed: float) -> str:
    other = pair[1] if pair[0] == node else pair[0]
    return f"{speed:.2f} GiB/s with {other}" if speed else f"no answer with {other}"
