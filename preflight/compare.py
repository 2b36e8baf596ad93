"""Facts that must agree between nodes: majority, outlier, difference. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from preflight.states import Finding, NodeReport

COMPARED = {
    "python.version": ("version",),
    "torch.backends": ("torch", "cuda", "devices", "nccl", "gloo", "nccl_version", "cudnn", "peers"),
    "libraries.mapped": ("libraries", "bytes"),
    "code.snapshot": ("sha256", "runs_from"),
    "host.environment": ("variables",),
    "host.files": ("files",),
    "host.limits": ("nofile", "memlock"),
    "host.network": ("mtu", "speed_mbit", "infiniband"),
    "device.gpus": ("compared",),
    "device.links": ("links",),
    "pins.files": ("digest", "folder"),
}
"""Facts that must agree between nodes, by check; of every `import.*` check IMPORT_FACTS must."""

IMPORT_FACTS = ("absent", "declared", "version", "from", "also", "editable", "record_sha256", "source_sha256")
LISTED = 3
"""Differences of one check that are written out; the others are counted."""

ADVICE = {
    "import": "install the same environment everywhere",
    "python": "use the same interpreter everywhere",
    "torch": "install the same environment everywhere",
    "libraries": "see LD_LIBRARY_PATH, LD_PRELOAD and NCCL_NET_PLUGIN on that node",
    "code": "the file system serves old files there: remount it, or submit again",
    "host": "make that node like the others",
    "device": "make that node like the others, or leave it out (slurm.exclude)",
    "pins": "the file system serves old files there: remount it, or submit again",
}

MORE_MEMORY = "raise slurm.mem (without it the partition's DefMemPerCPU holds), or end what else runs on this node"
LEAST_MEMORY = 0.5
"""Memory that the job can have on a node over the nodes' median, below which the node was given another limit, lost
memory modules, or is in use."""

MOST_POWER = 1.5
"""Power at rest over the cluster's median, besides 50 W, from which on something runs on a GPU unseen."""


def outliers(nodes: Sequence[NodeReport]) -> list[tuple[str, Finding]]:
    """Nodes whose facts differ from what most nodes say; where there is no majority, all that differ."""
    problems = []
    for check, rows in _passing([_comparable(node) for node in nodes]).items():
        keys = IMPORT_FACTS if check.startswith("import.") else COMPARED.get(check, ())
        differences: dict[str, list[str]] = defaultdict(list)
        for fact, values in _columns(rows, keys):
            for node, said in _odd(values):
                differences[node].append(f"{fact} {said}")
        facts = dict(rows)
        for node, found in differences.items():
            problems.append((node, _finding(check, found, facts[node])))
    return problems + _cramped(nodes) + _hungry(nodes) + _unanswered(nodes)


def _comparable(node: NodeReport) -> NodeReport:
    """A node that could not read the run's options did not check what the others did."""
    if not any(finding.check == "preflight.config" for finding in node.findings):
        return node
    alike = ("import.", "python.", "torch.", "libraries.", "code.")
    return dataclasses.replace(node, findings=tuple(f for f in node.findings if f.check.startswith(alike)))


def _passing(nodes: Sequence[NodeReport]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    rows: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for node in nodes:
        for finding in node.findings:
            if finding.state == "pass":
                rows[finding.check].append((node.node, finding.facts))
    return rows


def _columns(
    rows: Sequence[tuple[str, dict[str, Any]]], keys: Sequence[str]
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each fact with what every node says of it; a fact that is a table is one fact per entry.

    A node that says nothing of a fact is not compared in it: why it does not is another check's.
    """
    for key in keys:
        flat = [(node, _flatten({key: facts[key]})) for node, facts in rows if key in facts]
        for name in dict.fromkeys(name for _, facts in flat for name in facts):
            values = [(node, facts.get(name, "absent")) for node, facts in flat]
            if len({value for _, value in values}) > 1:
                yield name, values


def _flatten(facts: dict[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            found |= _flatten(value, f"{prefix}{name} ")
        else:
            found[f"{prefix}{name}"] = value if isinstance(value, str) else repr(value)
    return found


def _odd(values: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Nodes that differ from the majority, or, without one, every node, each with what it says and what others do."""
    counts = Counter(value for _, value in values)
    (common, count), *others = counts.most_common()
    tied = bool(others) and others[0][1] == count
    for node, value in values:
        if tied:
            rest = ", ".join(_short(other) for other in counts if other != value)
            yield node, f"is {_short(value)} here, {rest} elsewhere, and no majority says which is right"
        elif value != common:
            yield node, f"is {_short(value)} here, {_short(common)} on {count} of {len(values)} nodes"


def _short(value: str) -> str:
    """Hashes by their beginnings."""
    return value[:12] if len(value) == 64 and value.isalnum() else value


def _finding(check: str, differences: list[str], facts: dict[str, Any]) -> Finding:
    area, _, subject = check.partition(".")
    shown = "; ".join(differences[:LISTED])
    more = f"; and {len(differences) - LISTED} more differences" if len(differences) > LISTED else ""
    where = facts.get("path") or facts.get("executable") or ""
    found = f"{subject}: {shown}{more}" + (f" ({where})" if where else "")
    return Finding(check, "fail", found, ADVICE[area])


def _cramped(nodes: Sequence[NodeReport]) -> list[tuple[str, Finding]]:
    """Nodes on which the job can have far less memory than on the others."""
    told = [(node.node, finding) for node in nodes for finding in node.findings
            if finding.check == "host.memory" and "gib" in finding.facts]  # fmt: skip
    median = statistics.median(finding.facts["gib"] for _, finding in told) if told else 0.0
    return [
        (node, Finding("host.memory", "fail", f"{finding.found}, the median of {len(told)} nodes is {median:.1f} GiB",
                       MORE_MEMORY))
        for node, finding in told
        if finding.state == "pass" and finding.facts["gib"] < LEAST_MEMORY * median
    ]  # fmt: skip


def _hungry(nodes: Sequence[NodeReport]) -> list[tuple[str, Finding]]:
    """GPUs that draw far more power at rest than the others."""
    drawn = [(node.node, gpu["index"], float(gpu["power.draw"])) for node in nodes for finding in node.findings
             if finding.check == "device.gpus" for gpu in finding.facts.get("gpus", [])
             if gpu["power.draw"].replace(".", "", 1).isdigit()]  # fmt: skip
    if len({node for node, _, _ in drawn}) < 2:
        return []
    median = statistics.median(watts for _, _, watts in drawn)
    return [
        (node, Finding("device.power", "fail", f"GPU {index} draws {watts:.0f} W at rest, the median is {median:.0f} W",
                       "look for what runs on it, in other containers too"))
        for node, index, watts in drawn
        if watts > MOST_POWER * median + 50
    ]  # fmt: skip


def _unanswered(nodes: Sequence[NodeReport]) -> list[tuple[str, Finding]]:
    """Checks that most nodes answered and a node has no word of: it ran other code, or came to a stop."""
    asked = Counter(check for node in nodes for check in {finding.check for finding in node.findings})
    problems = []
    for node in nodes:
        own = {finding.check for finding in node.findings}
        if "node.answer" in own:
            continue
        areas = {finding.check.partition(".")[0] for finding in node.findings if finding.state != "pass"}
        for check, count in asked.items():
            if check not in own and count > len(nodes) / 2 and check.partition(".")[0] not in areas:
                problems.append((node.node, Finding(check, "broken", f"{check} was not checked here",
                                                    "does this node run the same code?")))  # fmt: skip
    return problems
