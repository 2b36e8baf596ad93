"""The four answers of a check, and the record that carries one."""

from __future__ import annotations

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
        """The inverse of `to_json`; raises KeyError or TypeError on a foreign document."""
        findings = tuple(Finding(**finding) for finding in document["findings"])
        return cls(str(document["node"]), findings, float(document["seconds"]), float(document["wall"]))
