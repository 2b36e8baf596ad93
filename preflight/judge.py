"""All nodes' reports -> one verdict. Pure: no clock, no files, no host."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from preflight.compare import outliers
from preflight.states import WORST_FIRST, Finding, NodeReport

MOST_SKEW_S = 2.0
"""A node's clock may be so far ahead of the judge's."""
OLD_S = 600.0
"""An answer may be so much older than the others'."""
CAUSES = ("python.version",)
"""Checks that are told first of their node: what others found there may follow from it, as failed imports do."""


@dataclass(frozen=True)
class Problem:
    """A finding that stops the job (or would, had it not been allowed)."""

    node: str
    finding: Finding
    allowed: bool


@dataclass(frozen=True)
class Verdict:
    """passed: may the job go on. problems: the odd node first. nodes: all, in the order asked for."""

    passed: bool
    problems: tuple[Problem, ...]
    nodes: tuple[NodeReport, ...]
    allow: tuple[str, ...] = ()

    @property
    def bad_nodes(self) -> tuple[str, ...]:
        """Nodes with at least one problem that is not allowed."""
        return tuple(dict.fromkeys(problem.node for problem in self.problems if not problem.allowed))


def judge(
    reports: Iterable[NodeReport],
    expected: Sequence[str],
    allow: Sequence[str] = (),
    *,
    received: float | None = None,
    between: Sequence[tuple[str, Finding]] = (),
) -> Verdict:
    """Judge all nodes together.

    expected: names of the nodes that should have answered; one without a report is `silent`. allow: names of checks
    whose problems are shown but do not stop the job. received: the judge's clock when it had read all reports.
    between: what the collective test found, by node (see `pairs.judge_ranks`).
    """
    answered = {report.node: report for report in reports}
    missing = [_silent(node) for node in expected if node not in answered]
    nodes = [*answered.values(), *missing]
    found = [(node.node, finding) for node in nodes for finding in node.findings if finding.state != "pass"]
    found += [*outliers(nodes), *_cut_off(nodes), *_clocks(nodes, received)]
    found += [(node, finding) for node, finding in between if finding.state != "pass"]
    found.sort(key=lambda pair: (WORST_FIRST.index(pair[1].state), pair[0], pair[1].check not in CAUSES, pair[1].check))
    problems = tuple(Problem(node, finding, finding.check in allow) for node, finding in found)
    return Verdict(all(problem.allowed for problem in problems), problems, tuple(nodes), tuple(allow))


def _silent(node: str) -> NodeReport:
    advice = "look at the node's log in logs/, and whether the node is up"
    return NodeReport(node, (Finding("node.answer", "silent", "gave no answer in time", advice),))


def _clocks(nodes: Sequence[NodeReport], received: float | None) -> list[tuple[str, Finding]]:
    """Answers from the future, which only a wrong clock can give; and answers much older than the others."""
    timed = [node for node in nodes if node.wall]
    if not timed or received is None:
        return []
    middle = statistics.median(node.wall for node in timed)
    problems = []
    for node in timed:
        if node.wall > received + MOST_SKEW_S:
            found, advice = f"its clock is at least {node.wall - received:.0f} s ahead of the judge's", "start chronyd"
            problems.append((node.node, Finding("host.clock", "fail", found, advice)))
        elif node.wall < middle - OLD_S:
            found = (
                f"its answer is {middle - node.wall:.0f} s older than most: its clock is behind, or it is an old answer"
            )
            advice = "start chronyd there, and check the node again"
            problems.append((node.node, Finding("host.clock", "fail", found, advice)))
    return problems


def _cut_off(nodes: Sequence[NodeReport]) -> list[tuple[str, Finding]]:
    """With several nodes a host name that means loopback, or no interface of its node, cuts the node off."""
    if len(nodes) < 2:
        return []
    advice = "map the host name to the node's own address in DNS or /etc/hosts, or set GLOO_SOCKET_IFNAME"
    return [
        (node.node, Finding("host.name", "fail", f"{node.node} resolves to {', '.join(finding.facts['addresses'])}, "
                            f"{why}", advice))
        for node in nodes
        for finding in node.findings
        if finding.check == "host.name" and (why := _unreachable(finding.facts))
    ]  # fmt: skip


def _unreachable(facts: dict[str, Any]) -> str:
    """Why other nodes cannot reach a node by the addresses of its name; empty where they can, or nothing is known."""
    if facts.get("loopback"):
        return "a loopback address, which other nodes cannot reach"
    return "which no interface of this node has" if facts.get("interface", "unknown") is None else ""
