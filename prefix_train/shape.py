"""What memory and time depend on of a pack. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

DELTA_CHUNK = 64
"""Tokens per chunk of the delta rule: its kernels keep one state per chunk."""


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
class Shape:
    """What memory and time depend on of a pack.

    positions: T. pairs: visible pairs. segments: S. inner: those with children. chunks: of DELTA_CHUNK tokens, counted
    per segment. rows: prediction rows that go through the head. level, level_chunks: tokens and chunks of the depth
    that has most tokens: a recurrent kernel runs over one depth at a time. piece: most of 3 x queries + 4 x keys over
    the dense pieces of attention: copies of keys and values for each query head, their gradients, and the queries', in
    the kernel's float32 too.
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
        together = Counter[int]()
        for length in lengths:
            together[length] += 7 * length
        reads = (
            3 * (under - length) + 4 * length for under, length in zip(below, lengths, strict=True) if under > length
        )
        return cls(
            sum(lengths), visible_pairs(lengths, parents), len(lengths), len(set(parents) - {-1}), sum(chunks), rows,
            tokens[level], of_level[level], max(max(together.values(), default=0), max(reads, default=0)),
        )  # fmt: skip
