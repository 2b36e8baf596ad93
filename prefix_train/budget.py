"""Arithmetic of packs. (bytes and FLOPs follow)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Predicted time of a pack, in positions: per_position for each position, per_pair for each visible pair.

    The default is that of a hybrid model of 27B parameters (hidden 5,120, 16 of 64 layers with attention).
    """

    per_position: float = 1.0
    per_pair: float = 8e-6

    def of(self, positions: int, pairs: int) -> float:
        """Predicted time of a pack, in units of the time of one position."""
        return self.per_position * positions + self.per_pair * pairs


def visible_pairs(lengths: Sequence[int], parents: Sequence[int]) -> int:
    """(query, key) pairs that attention computes: each token sees itself, its segment so far, and all ancestors."""
    pairs = 0
    ends: list[int] = []
    for length, parent in zip(lengths, parents, strict=True):
        above = ends[parent] if parent >= 0 else 0
        ends.append(above + length)
        pairs += length * (length + 1) // 2 + length * above
    return pairs
