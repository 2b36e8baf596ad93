"""What memory and time depend on of a pack. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

DELTA_CHUNK = 64
"""Tokens per chunk of the delta rule: its kernels keep one state per chunk."""


CALL = 128
"""Segments of one depth that a recurrent kernel computes at a time (`groups.GROUP`)."""


def visible_pairs(lengths: Sequence[int], parents: Sequence[int]) -> int:
    """(query, key) pairs that attention computes: each token sees itself, its segment so far, and all ancestors."""
    pairs = 0
    ends: list[int] = []
    for length, parent in zip(lengths, parents, strict=True):
        above = ends[parent] if parent >= 0 else 0
        ends.append(above + length)
        pairs += length * (length + 1) // 2 + length * above
    return pairs


@dataclass(frozen=True)
class Call:
    """One call of a recurrent kernel, with up to CALL segments of one depth, as `groups` lays them out for plain torch.

    tokens: of its segments. rows: with what fills their last chunks up, of `chunk` tokens each. handed: states that a
    chunk hands to the next one. written: rows whose chunks change a state that is read; copied: of these, those in
    steps with several segments.
    """

    tokens: int
    segments: int
    chunk: int
    rows: int
    handed: int
    written: int
    copied: int

    @classmethod
    def of(cls, lengths: Sequence[int], stored: bool) -> Call:
        """Of segments of these lengths. stored: has any of them children?"""
        chunk = min(DELTA_CHUNK, max(lengths))
        steps = [-(-length // chunk) for length in lengths]
        active = [sum(count > step for count in steps) for step in range(max(steps))]
        writing = active if stored else active[:-1]
        several = sum(count for count in writing if count > 1)
        rows = [chunk * sum(active), chunk * sum(writing), chunk * several]
        return cls(sum(lengths), len(lengths), chunk, rows[0], sum(active[:-1]), rows[1], rows[2])


@dataclass(frozen=True)
class Shape:
    """What memory and time depend on of a pack.

    positions: T. pairs: visible pairs. segments: S. inner: those with children. chunks: of DELTA_CHUNK tokens, counted
    per segment. rows: prediction rows that go through the head. level, level_chunks: tokens and chunks of the depth
    that has most tokens: a recurrent kernel runs over one depth at a time. piece: most of 3 x queries + 4 x keys over
    the dense pieces of attention: copies of keys and values for each query head, their gradients, and the queries', in
    the kernel's float32 too. joined: as `piece`, while there are also the gradients of queries that all pieces before
    it gave, or all of them and what they come to. reordered: positions that have to be sorted by depth. calls: of
    recurrent kernels, by depth.
    """

    positions: int
    pairs: int
    segments: int
    inner: int
    chunks: int
    rows: int
    level: int
    level_chunks: int
    piece: int
    joined: int
    reordered: int
    calls: tuple[Call, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], parents: Sequence[int], rows: int) -> Shape:
        """The shape of a pack of these segments."""
        chunks = [-(-length // DELTA_CHUNK) for length in lengths]
        depths: list[int] = []
        below = list(lengths)
        for parent in parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        for segment in reversed(range(len(parents))):
            if parents[segment] >= 0:
                below[parents[segment]] += below[segment]
        tokens, of_level = Counter[int](), Counter[int]()
        for depth, length, count in zip(depths, lengths, chunks, strict=True):
            tokens[depth] += length
            of_level[depth] += count
        level = max(tokens, key=lambda depth: (tokens[depth], of_level[depth]), default=0)
        pieces = list(_pieces(lengths, below))
        return cls(
            sum(lengths), visible_pairs(lengths, parents), len(lengths), len(set(parents) - {-1}), sum(chunks), rows,
            tokens[level], of_level[level], max((3 * queries + 4 * keys for queries, keys in pieces), default=0),
            _joined(pieces, sum(lengths)), sum(lengths) * (depths != sorted(depths)),
            tuple(_calls(lengths, parents, depths)),
        )  # fmt: skip


def _pieces(lengths: Sequence[int], below: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Queries and keys of each dense piece of attention, in the order in which they are computed.

    Segments of one length together, the short ones first, each seeing itself; then, for each segment, what is below it.
    """
    for length, count in sorted(Counter(lengths).items()):
        yield count * length, count * length
    for under, length in zip(below, lengths, strict=True):
        if under > length:
            yield under - length, length


def _joined(pieces: Sequence[tuple[int, int]], positions: int) -> int:
    """See `Shape.joined`."""
    if len(pieces) < 2:
        return sum(3 * queries + 4 * keys for queries, keys in pieces)
    before = list(accumulate((queries for queries, _ in pieces), initial=0))
    moments = (there + 3 * queries + 4 * keys for there, (queries, keys) in zip(before, pieces, strict=False))
    return max(*moments, before[-1] + positions)


def _calls(lengths: Sequence[int], parents: Sequence[int], depths: Sequence[int]) -> Iterator[Call]:
    of_depth: dict[int, list[int]] = {}
    for segment, depth in enumerate(depths):
        of_depth.setdefault(depth, []).append(segment)
    inner = set(parents)
    for _, segments in sorted(of_depth.items()):
        for first in range(0, len(segments), CALL):
            part = segments[first : first + CALL]
            yield Call.of([lengths[segment] for segment in part], any(segment in inner for segment in part))
