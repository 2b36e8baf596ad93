"""The four answers of a check, and the record that carries one."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["pass", "fail", "broken", "silent"]
"""pass; fail: the node is at fault; broken: the check could not do its work; silent: no answer in time."""

WORST_FIRST: tuple[State, ...] = ("fail", "broken", "silent", "pass")


@dataclass(frozen=True)
class Finding:
    """What one check says about one node.

    check: its name, `area.subject`, which `preflight.allow` may list. found: what was seen, in the node's own words.
    advice: what to do about it. facts: values that the judge compares between nodes.
    """

    check: str
    state: State
    found: str
    advice: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeReport:
    """Everything that one node said. seconds: what its checks took. wall: its clock when they had ended, 0: unknown."""

    node: str
    findings: tuple[Finding, ...]
    seconds: float = 0.0
    wall: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A document of built-in types."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> NodeReport:
        """The inverse of `to_json`; raises KeyError, TypeError or ValueError on a foreign document.

        An answer without a finding is none: nothing was checked.
        """
        findings = tuple(map(_finding, document["findings"]))
        node, seconds, wall = document["node"], float(document["seconds"]), float(document["wall"])
        if not isinstance(node, str) or not findings or not math.isfinite(seconds + wall):
            raise ValueError("a name, findings, seconds and a time are expected")
        return cls(node, findings, seconds, wall)


def _finding(document: dict[str, Any]) -> Finding:
    found = Finding(**document)
    texts = (found.check, found.found, found.advice)
    if found.state not in WORST_FIRST or {*map(type, texts)} != {str} or not isinstance(found.facts, dict):
        raise ValueError(f"no finding: {document}"[:200])
    return found
