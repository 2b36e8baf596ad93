"""All nodes' reports -> one verdict. Pure: no clock, no files, no host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from preflight.states import WORST_FIRST, Finding, NodeReport, State

COMPARED = {
    "python.version": ("version",),
    "torch.backends": ("torch", "cuda", "devices", "nccl", "gloo"),
}
"""Facts that must agree between nodes, by check; of every `import.*` check IMPORT_FACTS must."""

IMPORT_FACTS = ("absent", "declared", "version", "record_sha256")


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

    @property
    def bad_nodes(self) -> tuple[str, ...]:
        """Nodes with at least one problem that is not allowed."""
        return tuple(dict.fromkeys(problem.node for problem in self.problems if not problem.allowed))


def judge(reports: Iterable[NodeReport], expected: Sequence[str], allow: Sequence[str] = ()) -> Verdict:
    """Judge all nodes together.

    expected: names of the nodes that should have answered; one without a report is `silent`. allow: names of checks
    whose problems are shown but do not stop the job.
    """
    answered = {report.node: report for report in reports}
    missing = [_silent(node) for node in expected if node not in answered]
    nodes = [*answered.values(), *missing]
    found = [(node.node, finding) for node in nodes for finding in node.findings if finding.state != "pass"]
    found += [*_outliers(nodes), *_loopback(nodes)]
    found.sort(key=lambda pair: (WORST_FIRST.index(pair[1].state), pair[0], pair[1].check))
    problems = tuple(Problem(node, finding, finding.check in allow) for node, finding in found)
    return Verdict(all(problem.allowed for problem in problems), problems, tuple(nodes))


def _silent(node: str) -> NodeReport:
    advice = "look at the node's log in logs/, and whether the node is up"
    return NodeReport(node, (Finding("node.answer", "silent", "gave no answer in time", advice),))


def _outliers(nodes: Sequence[NodeReport]) -> list[tuple[str, Finding]]:
    """Nodes whose facts differ from what most nodes say."""
    problems: list[tuple[str, Finding]] = []
    by_check: dict[str, list[tuple[str, Finding]]] = {}
    for node in nodes:
        for finding in node.findings:
            if finding.state == "pass":
                by_check.setdefault(finding.check, []).append((node.node, finding))
    for check, rows in by_check.items():
        keys = IMPORT_FACTS if check.startswith("import.") else COMPARED.get(check, ())
        for key in keys:
            values = [repr(finding.facts.get(key)) for _, finding in rows]
            common, count = Counter(values).most_common(1)[0]
            for (name, finding), value in zip(rows, values, strict=True):
                if value != common:
                    problems.append((name, _differs(check, key, value, common, count, len(rows), finding)))
    return problems


def _differs(check: str, key: str, value: str, common: str, count: int, total: int, finding: Finding) -> Finding:
    where = finding.facts.get("path") or finding.facts.get("executable") or ""
    found = f"{check.split('.')[-1]}: {key} is {value} here, {common} on {count} of {total} nodes"
    state: State = "fail"
    return Finding(check, state, f"{found} ({where})" if where else found, "install the same environment everywhere")


def _loopback(nodes: Sequence[NodeReport]) -> list[tuple[str, Finding]]:
    """With several nodes a host name that means loopback cuts its node off."""
    if len(nodes) < 2:
        return []
    advice = "map the host name to the node's own address in DNS or /etc/hosts, or set GLOO_SOCKET_IFNAME"
    return [
        (node.node, Finding("host.name", "fail", f"{node.node} resolves to {finding.facts['addresses']}", advice))
        for node in nodes
        for finding in node.findings
        if finding.check == "host.name" and finding.facts.get("loopback")
    ]
