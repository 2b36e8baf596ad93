"""Where the ranks' collectives first differ, and which ranks are the odd ones. Pure.

Every rank must make the same collectives in the same order. What rank r called as number n of a group is compared with
what the others called as number n. The ranks in the minority are the odd ones; between equal parties a rank's own
earlier updates tell what it should have called. Where neither decides, nobody is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from slurm.evidence import Collective

Ring = Sequence[Collective]

UNEQUAL_BY_NATURE = frozenset({"gather", "scatter", "all_to_all", "all_to_all_single", "send", "recv"})
"""Kinds whose inputs may differ in size from rank to rank."""
WITHOUT_DATA = "barrier"
"""Takes no call's place: what the others exchanged would still be wanted."""
SAME_PLACE_LINES = 3
"""Two calls this few lines apart are the same statement with another branch."""
PAIRS = " pairs"
"""Ends the names of groups whose calls are between two ranks alone."""
CONTEXT = 8
"""Collectives before the one in question that have to be the same for an earlier update to count as precedent."""
ORDERED = ("load", "data", "compile", "forward", "reduce", "optimizer", "evaluate", "save", "done")
STAGES = {name: place for place, name in enumerate(ORDERED)}
"""Order of the phases of an update; forward and backward alternate from pack to pack."""
OPTIONAL = frozenset({"evaluate", "save"})
"""Phases that not every update has."""
BY_PACK = frozenset({"first_update", "forward", "backward"})

Way = Literal["missing", "extra", "kind", "other", "size", "dtype"]
"""other: another kind from another place; one more call and this one instead would look the same so far."""


@dataclass(frozen=True)
class Divergence:
    """The first number at which ranks of a group differ.

    odd: ranks that left the common sequence; empty where nobody can say which party did. way: what they did. theirs,
    others: the call of the first odd rank (else of the smaller party) and of the rest.
    """

    group: str
    number: int
    way: Way
    odd: tuple[int, ...]
    parties: tuple[tuple[int, ...], ...]
    theirs: Collective
    others: Collective


def earliest(rings: Mapping[int, Ring]) -> Divergence | None:
    """The first divergence over all groups; None where all that can be compared is equal."""
    groups = sorted({one.group for ring in rings.values() for one in ring if not one.group.endswith(PAIRS)})
    found = [each for group in groups if (each := _in_group(group, rings)) is not None]
    return min(found, key=lambda each: each.theirs.started, default=None)


def last_numbers(rings: Mapping[int, Ring], group: str) -> dict[int, int]:
    """Number of each rank's last collective in `group`."""
    last = {rank: max((one.number for one in ring if one.group == group), default=None) for rank, ring in rings.items()}
    return {rank: number for rank, number in last.items() if number is not None}


def _in_group(group: str, rings: Mapping[int, Ring]) -> Divergence | None:
    numbered = {rank: {one.number: one for one in ring if one.group == group} for rank, ring in rings.items()}
    everywhere = sorted({number for calls in numbered.values() for number in calls})
    called = {n: {rank: calls[n] for rank, calls in numbered.items() if n in calls} for n in everywhere}
    apart = [n for n in everywhere if len({_shape(one) for one in called[n].values()}) > 1]
    common = [n for n in everywhere if len(called[n]) > 1]
    if apart:
        first = apart[0]
    elif common and not _same_place(called[common[-1]].values()):
        first = common[-1]  # equal in kind and size: it went through with what did not belong together
    else:
        return None
    while first - 1 in called and not _same_place(called[first - 1].values()):
        first -= 1
    return _judge(group, first, called[first], numbered)


def _judge(
    group: str, number: int, calls: Mapping[int, Collective], numbered: Mapping[int, Mapping[int, Collective]]
) -> Divergence:
    parties: dict[tuple[object, ...], list[int]] = {}
    for rank, one in sorted(calls.items()):
        parties.setdefault((_shape(one), one.where), []).append(rank)
    ordered = sorted(parties.values(), key=len)
    odd: tuple[int, ...] = ()
    if len(ordered) > 1 and len(ordered[-1]) > len(ordered[-2]):
        odd = tuple(sorted(rank for party in ordered[:-1] for rank in party))
    else:
        strange = [party for party in ordered if not _has_precedent(number, numbered[party[0]])]
        if len(strange) == 1:
            odd = tuple(strange[0])
    first = odd[0] if odd else ordered[0][0]
    rest = [rank for rank in calls if rank not in odd] if odd else ordered[-1]
    theirs, others = calls[first], calls[rest[0]]
    way = _way(theirs, others, numbered[first], numbered[rest[0]])
    if way in ("extra", "other") and not odd:
        way = "kind" if theirs.kind != others.kind else "size"
    return Divergence(group, number, way, odd, tuple(map(tuple, ordered)), theirs, others)


def _way(
    theirs: Collective, others: Collective, mine: Mapping[int, Collective], reference: Mapping[int, Collective]
) -> Way:
    """What the rank that called `theirs` did, where the others called `others` under the same number."""
    if _place_close(theirs.where, others.where) and _position(theirs) == _position(others):
        if theirs.kind != others.kind:
            return "kind"
        return "size" if theirs.sizes != others.sizes else "dtype"
    if theirs.phase in OPTIONAL and others.phase not in OPTIONAL and theirs.update <= others.update:
        return "extra"
    if _position(theirs) != _position(others):
        return "missing" if _position(theirs) > _position(others) else "extra"
    known = {(one.where, one.kind) for calls in (mine, reference) for n, one in calls.items() if n < theirs.number}
    if (theirs.where, theirs.kind) in known and _follows(theirs, others, reference):
        return "missing"
    told = theirs.kind in (others.kind, WITHOUT_DATA) or _one_ahead(theirs.number, mine, reference)
    return "extra" if told else "other"


def _one_ahead(number: int, mine: Mapping[int, Collective], reference: Mapping[int, Collective]) -> bool:
    """Whether after its call `number` a rank made the others' calls one number later; what fits both ways is counted.

    mine: of the rank. reference: of one of the others.
    """
    later = [n for n in mine if n > number]
    ahead = [_token(mine[n]) == _token(reference[n - 1]) for n in later if n - 1 in reference]
    abreast = [_token(mine[n]) == _token(reference[n]) for n in later if n in reference]
    return bool(ahead) and all(ahead) and (not all(abreast) or max(mine) > max(reference))


def _follows(theirs: Collective, others: Collective, reference: Mapping[int, Collective]) -> bool:
    """Whether in earlier updates the call `theirs` came soon after a call such as `others`."""
    earlier = [reference[n] for n in sorted(reference) if n < others.number]
    for place, one in enumerate(earlier):
        if _token(one) == _token(others):
            return any(_token(later) == _token(theirs) for later in earlier[place + 1 : place + 1 + CONTEXT])
    return False


def _has_precedent(number: int, calls: Mapping[int, Collective]) -> bool:
    """Whether the rank has called number `number` after the same calls before, in an earlier update."""
    before = [_token(calls[n]) for n in range(number - CONTEXT, number) if n in calls]
    if len(before) < CONTEXT:
        return True  # nothing to hold against it
    numbers = sorted(n for n in calls if n < number)
    tokens = [_token(calls[n]) for n in numbers]
    followed = Counter(
        tokens[start + CONTEXT]
        for start in range(len(tokens) - CONTEXT)
        if tokens[start : start + CONTEXT] == before and numbers[start + CONTEXT] < number
    )
    return not followed or _token(calls[number]) in followed


def _token(one: Collective) -> tuple[object, ...]:
    """A call without its sizes: packs differ from update to update."""
    return one.kind, one.where


def _shape(one: Collective) -> tuple[object, ...]:
    """What has to be the same on all ranks."""
    return (one.kind,) if one.kind in UNEQUAL_BY_NATURE else (one.kind, one.sizes, one.dtype)


def _same_place(calls: Iterable[Collective]) -> bool:
    return len({one.where for one in calls}) <= 1


def _place_close(one: str, other: str) -> bool:
    (file, _, line), (elsewhere, _, other_line) = one.rpartition(":"), other.rpartition(":")
    if not (line.isdecimal() and other_line.isdecimal()):
        return one == other
    return file == elsewhere and abs(int(line) - int(other_line)) <= SAME_PLACE_LINES


def _position(one: Collective) -> tuple[int, ...]:
    """How far a call is in the run; within an update packs go forward and backward one after the other."""
    if one.phase in BY_PACK:
        return one.update, STAGES["forward"], max(one.pack, 0), int(one.phase == "backward")
    return one.update, STAGES.get(one.phase, STAGES["forward"]), 0, 0
