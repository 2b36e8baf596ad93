"""Rules of a verdict about collectives that differ from rank to rank. Pure."""

from __future__ import annotations

import re

from prefix_train.heartbeat import End
from slurm import divergence, signs, wording
from slurm.evidence import Collective
from slurm.finding import Finding, Kind, Sure
from slurm.views import Case

MISMATCH = re.compile(r"mismatch|preamble|op\.nbytes|differ", re.IGNORECASE)
"""What gloo, and torch with TORCH_DISTRIBUTED_DEBUG=DETAIL, say of collectives that do not fit."""

KINDS: dict[divergence.Way, Kind] = {
    "missing": "missing_rank",
    "extra": "extra_collective",
    "kind": "kind_mismatch",
    "other": "kind_mismatch",
    "size": "size_mismatch",
    "dtype": "size_mismatch",
}


def odd(end: End) -> bool:
    """Whether a rank ended in the way in which collectives that do not fit end ranks."""
    return end.signal == "SIGABRT" or bool(MISMATCH.search(end.message or ""))


def broken_collective(case: Case) -> Finding | None:
    """Collectives that did not fit end a rank under gloo, not always the one at fault."""
    first = next(iter(case.ended), None)
    if first is None or first.end is None or case.divergence is None:
        return None
    return _diverged(case) if odd(first.end) or signs.lost(first) else None


def skips_module(case: Case) -> Finding | None:
    """Updates stall and go on, and some ranks do not call what others call: slow, not dead."""
    if not (case.advanced or signs.stalled_before(case)):
        return None
    found = _skipped(case)
    if found is None:
        return None
    clause = f"slow, not dead: {found.clause}"
    return Finding("slow_alive", found.ranks, clause, found.where, ends=False, advice=found.advice)


def diverged(case: Case) -> Finding | None:
    """The ranks' collectives differ: the first difference is the cause, whatever came of it."""
    return _diverged(case)


def _diverged(case: Case) -> Finding | None:
    found = case.divergence
    if found is None:
        return None
    theirs, others = found.theirs, found.others
    odd = [case.view(rank) for rank in found.odd]
    if not odd:
        parties = " and ".join(f"{wording.numbers(party)}" for party in found.parties)
        clause = (
            f"ranks {parties} differ at collective {found.number}: {wording.call(theirs)}{_sizes(theirs, others)} "
            f"against {wording.call(others)}; which of them is wrong cannot be told"
        )
        return Finding(KINDS[found.way], (), clause, theirs.where, sure="medium")
    place = f"{theirs.phase} of update {theirs.update}"
    if found.way == "missing":
        after = f" after {others.pack} pack{'s' * (others.pack != 1)}" if others.pack >= 0 else ""
        did = (
            f"left {others.phase} of update {others.update}{after} and went on to {wording.call(theirs)} in {place}, "
            f"while the others were at {wording.call(others)}"
        )
    elif found.way == "extra":
        did = f"called one more collective, {wording.call(theirs)} in {place}; the others called {wording.call(others)}"
    elif found.way in ("kind", "other"):
        did = f"called {wording.call(theirs)} in {place} where the others called {wording.call(others)}"
        if found.way == "other":
            did += "; whether one more or this one instead cannot be told: nothing after it is shifted by one"
    else:
        did = f"called {wording.call(theirs)} in {place} with{_sizes(theirs, others)}"
    advice = f"compare what rank {odd[0].rank} does at {wording.short(theirs.where)} with the others"
    sure: Sure = "medium" if found.way == "other" else "high"
    return Finding(KINDS[found.way], found.odd, f"{wording.name(odd)} {did}", theirs.where, sure=sure, advice=advice)


def _sizes(theirs: Collective, others: Collective) -> str:
    def text(one: Collective) -> str:
        return f"{one.dtype} {', '.join('x'.join(map(str, size)) or '1' for size in one.sizes)}"

    if theirs.kind != others.kind:
        return ""
    return f" {text(theirs)} against {text(others)}" if text(theirs) != text(others) else ""


def _skipped(case: Case) -> Finding | None:
    """Ranks whose ring has no call from a place that the other ranks call from again and again."""
    rings = {view.rank: view.ring for view in case.views if len(view.ring) >= signs.ENOUGH}
    if len(rings) < 2:
        return None
    counts = {rank: signs.by_place(ring) for rank, ring in rings.items()}
    places = sorted({place for count in counts.values() for place in count})
    for place in places:
        callers = [rank for rank, count in counts.items() if count.get(place, 0) >= 2]
        skippers = [rank for rank, count in counts.items() if place not in count]
        if callers and skippers and len(callers) + len(skippers) == len(counts):
            views = [case.view(rank) for rank in skippers]
            others = [case.view(rank) for rank in callers]
            clause = f"{wording.name(views)} {wording.verb(views, 'skips', 'skip')} {wording.short(place)}, which "
            clause += f"{wording.named(others)} {wording.verb(others, 'calls', 'call')}"
            advice = f"every rank has to call {wording.short(place)}, with or without work for it"
            return Finding("slow_alive", tuple(skippers), clause, place, advice=advice)
    return None
