"""What the files of a run folder hold, as far as this page tells of it, and a reader that names what it could not have.

A run that is damaged, or has only begun, is read as far as it goes. Secrets are masked as they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from configs import runfolder
from configs.redact import redact_value
from configs.runfolder import Damaged

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
LARGEST = 1e100
"""A figure beyond this is damage; it could not be drawn either."""

Record = TypeVar("Record")


@dataclass(frozen=True)
class Spread:
    """Of updates' counts."""

    least: float
    mean: float
    most: float


@dataclass(frozen=True)
class Pairs:
    """Pairs of positions that see each other."""

    packed: float
    standalone: float
    ratio: float


@dataclass(frozen=True)
class Histogram:
    """Lengths of examples: len(edges) - 1 counts."""

    edges: tuple[float, ...]
    examples: tuple[int, ...]


@dataclass(frozen=True)
class Waste:
    """How far above what any plan needs, as a share."""

    positions: float


@dataclass(frozen=True)
class Longest:
    """One of the longest examples."""

    source: str
    tokens: int


@dataclass(frozen=True)
class Plan:
    """`plan.json`: the first epoch of the run's plan. Only its last fields may be missing."""

    mode: str
    max_positions: int
    updates: int
    packs: int
    examples: int
    segments: int
    depth: int
    positions: int
    logical_tokens: int
    ratio: float
    fill: float
    balance: float
    packs_per_update: Spread
    examples_per_update: Spread
    visible_pairs: Pairs
    waste: Waste
    histogram: Histogram
    longest: tuple[Longest, ...] = ()
    empty_packs: int = 0
    digest: str = ""
    updates_in_run: int | None = None
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verify:
    """Packs against transformers' own model, by quantity; a bound that is none is reported only."""

    passed: bool
    examples: int
    tensors: int
    differences: Mapping[str, float]
    bounds: Mapping[str, float | None]
    failed: tuple[str, ...] = ()
    worst_gradient: str = ""


@dataclass(frozen=True)
class Tensors:
    """How many tensors were trained, and how many of them had a gradient."""

    trained: int
    covered: int
    without_gradient: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tracker:
    """What became of one experiment tracker: lines that it took, lines that it did not, and why."""

    taken: int = 0
    failed: int = 0
    error: str = ""


@dataclass(frozen=True)
class Result:
    """`result.json`, which only a complete run has."""

    updates: int = 0
    ranks: int | None = None
    packs: int | None = None
    examples: int | None = None
    targets: int | None = None
    positions: int | None = None
    logical_tokens: int | None = None
    tensors: Tensors | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    hash_before: str | None = None
    hash_after: str | None = None
    export: str | None = None
    heldout_examples: int | None = None
    heldout_loss: float | None = None
    accuracy: float | None = None
    chance: float | None = None
    fields: Mapping[str, float] = field(default_factory=dict)
    verify: Verify | None = None
    trackers: Mapping[str, Tracker] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One check of preflight on one node."""

    check: str
    state: str
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Problem:
    """What preflight did not like."""

    node: str
    finding: Finding
    allowed: bool = False


@dataclass(frozen=True)
class Node:
    """All checks of one node. wall: its clock when they had ended, seconds since 1970; 0: unknown."""

    node: str
    findings: tuple[Finding, ...] = ()
    wall: float = 0.0


@dataclass(frozen=True)
class Preflight:
    """`preflight/<life>/report.json`."""

    passed: bool
    headline: str
    problems: tuple[Problem, ...] = ()
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Life:
    """`lives/<n>.json`: where a life of a Slurm job ran, how it ended, what followed."""

    attempt: int
    job: str = ""
    nodes: tuple[str, ...] = ()
    cause: str | None = None
    update: int = 0
    excluded: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Ending:
    """`end.json`: how the newest life ended, and the last line of its job."""

    attempt: int
    status: int
    cause: str
    line: str


@dataclass(frozen=True)
class Alarm:
    """`hangs/<n>/alarm.json`: when and why evidence was taken. time: seconds since 1970."""

    attempt: int
    time: float
    sentence: str = ""
    node: int = 0


@dataclass(frozen=True)
class Verdict:
    """`hangs/<n>/verdict.json`."""

    attempt: int
    sentence: str
    kind: str = "unknown"
    ends: bool = False
    confidence: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Commit:
    """`code/COMMIT.json`: of which commit the frozen code is. dirty: it differs from that commit."""

    commit: str | None
    dirty: bool | None = None


class Reader:
    """Reads one run folder. missing: a line for each file that is not there although it is told of, or is damaged."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.missing: list[str] = []

    def json(self, name: str, kind: type[Record], absent: str | None = None, masked: bool = True) -> Record | None:
        """The record in file `name`; None where it cannot be had, and `missing` says why.

        absent: what is said where there is no such file; none: nothing. masked: without secrets.
        """
        data = self.data(name, absent)
        if data is None:
            return None
        try:
            document = msgspec.json.decode(data)
            return msgspec.convert(redact_value(document) if masked else document, kind)
        except UNREADABLE as error:
            self.missing.append(str(Damaged(f"{name} is damaged: {error}")))
        return None

    def data(self, name: str, absent: str | None = None) -> bytes | None:
        """The bytes of file `name`; None where it cannot be had."""
        try:
            return (self.run / name).read_bytes()
        except FileNotFoundError:
            self.missing += [absent] if absent else []
        except OSError as error:
            self.missing.append(f"{name} cannot be read: {error.strerror}")
        return None

    def numbered(self, folder: str, suffix: str = "") -> list[int]:
        """The numbers that entries of `folder` are named by, in order; none where there is no such folder."""
        try:
            names = [path.name for path in (self.run / folder).iterdir() if path.name.endswith(suffix)]
        except FileNotFoundError:
            return []
        except OSError as error:
            self.missing.append(f"{folder} cannot be read: {error.strerror}")
            return []
        stems = [name.removesuffix(suffix) for name in names]
        return sorted(int(stem) for stem in stems if stem.isascii() and stem.isdecimal() and len(stem) < 10)

    def metrics(self) -> list[dict[str, float]]:
        """The whole lines of metrics.jsonl; the last one, which is still being written, and damaged ones are not."""
        data = self.data(runfolder.METRICS, f"{runfolder.METRICS}: no update was done yet")
        lines, bad = [], []
        for number, text in enumerate((data or b"").split(b"\n")[:-1], 1):
            try:
                line = msgspec.json.decode(text, type=dict[str, float])
            except UNREADABLE as error:
                bad.append(f"line {number} is damaged: {error}")
                continue
            if "update" not in line or not all(abs(value) < LARGEST for value in line.values()):
                bad.append(f"line {number} is damaged: an update and finite figures are expected")
                continue
            lines.append(line)
        if bad:
            more = f"; and {len(bad) - 1} more such lines" if len(bad) > 1 else ""
            self.missing.append(f"{runfolder.METRICS}: {bad[0]}{more}")
        return lines
