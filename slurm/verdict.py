"""From evidence to one sentence: which rank, where, why, and how sure. Pure but for the files that it writes and reads.

`judge` looks at what the nodes have seen through the rules of `slurm.rules`. A rank that only waits is never named;
where nothing better can be said, that is said, with what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from configs import runfolder
from slurm import rules, views, wording
from slurm.evidence import UNREADABLE, Alarm, BadEvidence, Node
from slurm.finding import Finding, Kind, Rule, Sure
from slurm.views import Case

JSON, TEXT = "verdict.json", "verdict.txt"
ORDER: tuple[Sure, ...] = ("low", "medium", "high")


@dataclass(frozen=True)
class Verdict:
    """What is said of a run that stopped advancing, or ended.

    kind: the class of what happened. ends: whether the run has to be ended for it. ranks: those at fault, never one
    that only waits; empty where none can be named. nodes: hosts that the cause points to. where: `file:line`. since:
    wall clock, seconds since 1970, none where it is not known. missing: what could not be had, and why. advice: what to
    do next. lines: one for each rank.
    """

    attempt: int
    kind: Kind
    ends: bool
    ranks: tuple[int, ...]
    sentence: str
    nodes: tuple[str, ...] = ()
    where: str = ""
    since: float | None = None
    confidence: Sure = "low"
    missing: tuple[str, ...] = ()
    advice: str = ""
    lines: tuple[str, ...] = ()

    def text(self) -> str:
        """First line: the sentence. Then the advice, one line per rank, and what could not be had."""
        advice = [f"next: {self.advice}"] if self.advice else []
        missing = [f"not to be had: {reason}" for reason in self.missing]
        return "\n".join([self.sentence, *advice, *self.lines, *missing]) + "\n"


def judge(
    nodes: Sequence[Node],
    alarm: Alarm,
    world: int,
    hosts: Sequence[str],
    table: Sequence[Rule] = rules.RULES,
) -> Verdict:
    """What the evidence says of a job of `world` ranks on `hosts`, its nodes in order, over which ranks lie evenly.

    nodes: those that gave evidence; a node that did not counts as missing. table: the rules to ask, in order.
    """
    case = views.case(nodes, alarm, world, hosts)
    found = rules.decide(case, table)
    missing = tuple(_missing(case))
    confidence = _confidence(case, found)
    named = [case.view(rank) for rank in found.ranks]
    return Verdict(
        attempt=alarm.attempt,
        kind=found.kind,
        ends=alarm.must_end or (found.ends and not alarm.only_look),
        ranks=found.ranks,
        sentence=_sentence(case, found, confidence),
        nodes=tuple(dict.fromkeys([*(view.host for view in named), *found.nodes])),
        where=found.where,
        since=_since(case),
        confidence=confidence,
        missing=missing,
        advice=found.advice,
        lines=wording.lines(case),
    )


def latest(run: Path, attempt: int) -> str | None:
    """The sentence of this life's verdict that the run has to be ended; None without one."""
    found = decisive(run, attempt)
    return None if found is None else found.sentence


def culprits(run: Path, attempt: int) -> tuple[int, ...]:
    """The ranks that this verdict names."""
    found = decisive(run, attempt)
    return () if found is None else found.ranks


def decisive(run: Path, attempt: int) -> Verdict | None:
    """Of this life's verdicts that the run has to be ended the first that names a rank, else the first."""
    found = [one for one in map(load, folders(run)) if one is not None and one.ends and one.attempt == attempt]
    return max(found, key=lambda one: bool(one.ranks), default=None)


def folders(run: Path) -> list[Path]:
    """hangs/<n>, oldest first."""
    found = [path for path in (run / runfolder.HANGS).glob("*") if re.fullmatch(r"\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name))


def load(folder: Path) -> Verdict | None:
    """The verdict in hangs/<n>; None where there is none yet. Raises BadEvidence."""
    path = folder / JSON
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if "kind" not in document:  # of an earlier version of this suite
            document = {
                "attempt": document["attempt"],
                "kind": "unknown",
                "ends": document["stuck"],
                "ranks": document["culprits"],
                "sentence": document["sentence"],
            }
        return msgspec.convert(document, Verdict)
    except FileNotFoundError:
        return None
    except KeyError as error:
        raise BadEvidence(f"{path}: without {error.args[0]}") from error
    except UNREADABLE as error:
        raise BadEvidence(f"{path}: {error}") from error


def write(folder: Path, verdict: Verdict, run: Path) -> None:
    """Write verdict.txt and verdict.json into `folder`."""
    runfolder.write_text(folder / TEXT, verdict.text(), run=run)
    runfolder.write_json(folder / JSON, asdict(verdict), run=run)


def _sentence(case: Case, found: Finding, confidence: Sure) -> str:
    """Who, where, why; who waits; what the GPUs do; how sure."""
    parts = [found.clause]
    others = [view for view in case.waiting if view.rank not in found.ranks]
    if others and found.ends:
        parts.append(wording.waiting(others))
    sentence = "; ".join(part for part in parts if part) + "."
    spinning = wording.spinning(case)
    return " ".join(filter(None, (sentence, spinning, f"Confidence {confidence}: {_basis(case)}.")))


def _basis(case: Case) -> str:
    answered = sum(view.answered for view in case.views)
    basis = f"{answered} of {len(case.views)} ranks answered"
    rounds = [len(view.stacks) for view in case.views if view.answered and not view.gone]
    if rounds and min(rounds) > 1:
        basis += ", two samples agree" if not any(view.alive for view in case.views) else ", two samples differ"
    return basis


def _confidence(case: Case, found: Finding) -> Sure:
    """As sure as the rule is, less where ranks that matter gave nothing."""
    level = ORDER.index(found.sure)
    if case.silent:
        level = min(level, ORDER.index("medium"))
    blind = [view for view in case.views if view.answered and not view.gone and not view.stacks]
    if blind and found.kind not in ("rank_raised", "rank_died", "oom_killed"):
        level = min(level, ORDER.index("medium"))
    return ORDER[level]


def _missing(case: Case) -> list[str]:
    """What could not be had, and why, without repetitions."""
    found = [f"{node.host}: {reason}" for node in case.nodes for reason in node.missing]
    for view in case.views:
        if view.known is None:
            found.append(f"rank {view.rank}: no evidence from its node {view.host}")
            continue
        reasons = [*view.known.missing, *(reason for stack in view.stacks for reason in stack.missing)]
        found += [f"rank {view.rank}: {reason}" for reason in reasons]
    return list(dict.fromkeys(found))


def _since(case: Case) -> float | None:
    """When the first of those that wait began to wait; else when the alarm's rank came to where it is."""
    begun = [view.wall(view.pending.started) for view in case.waiting if view.pending is not None]
    if begun:
        return min(begun)
    if (first := next(iter(case.ended), None)) is not None and first.end is not None:
        return first.end.time
    return case.alarm.time - case.alarm.age if case.alarm.age else None
