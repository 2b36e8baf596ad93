"""Rows of keys that differ and meet again: where the same keys follow in several of them. R rows. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from prefix_train.tree import Ints


def groups(keys: Ints, length: Ints, branch: Ints, stretch: int, follow: int) -> Iterator[tuple[Ints, Ints]]:
    """Rows that meet again: for each group its rows [G] and where in each the `follow` equal tokens begin [G].

    keys: [R, window], the first `length` [R] of each row. branch: [R], ascending. stretch: most keys of a row before
    the equal ones. A group has rows of two branches at least, a row is in one group at most. The group of most rows
    goes first, of equal ones that with the shortest stretches.
    """
    offsets = np.arange(stretch + 1)
    row, at = np.nonzero(offsets + follow <= length[:, None])
    if not len(row):
        return
    value = _hashes(keys, stretch, follow)[row, at]
    order = np.argsort(value, kind="stable")
    value, row, at = value[order], row[order], at[order]
    once = np.r_[True, (value[1:] != value[:-1]) | (row[1:] != row[:-1])]
    value, row, at = value[once], row[once], at[once]
    begin = np.flatnonzero(np.r_[True, value[1:] != value[:-1]])
    end = np.r_[begin[1:], len(value)]
    several = branch[row[begin]] != branch[row[end - 1]]
    if not several.any():
        return
    taken = np.zeros(len(keys), np.bool_)
    for first, last in _largest_first(begin[several], end[several], row, at):
        free = ~taken[row[first:last]]
        members, places = row[first:last][free], at[first:last][free]
        if not len(members):
            continue
        texts = keys[members[:, None], places[:, None] + np.arange(follow)]
        equal = (texts == texts[0]).all(axis=1)
        members, places = members[equal], places[equal]
        if branch[members[0]] != branch[members[-1]]:
            taken[members] = True
            yield members, places


def _hashes(keys: Ints, stretch: int, follow: int) -> NDArray[np.uint64]:
    """[R, stretch + 1] a hash of the `follow` keys from each place on: equal ones for equal keys."""
    base = 0x9E3779B97F4A7C15
    powers = np.cumprod(np.full(keys.shape[1], base, np.uint64), dtype=np.uint64)
    inverse = np.cumprod(np.full(stretch + 1, pow(base, -1, 1 << 64), np.uint64), dtype=np.uint64)
    mixed = keys.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    mixed ^= mixed >> np.uint64(32)
    sums = np.zeros((len(keys), keys.shape[1] + 1), np.uint64)
    np.cumsum(mixed * powers, axis=1, out=sums[:, 1:])
    found: NDArray[np.uint64] = (sums[:, follow : follow + stretch + 1] - sums[:, : stretch + 1]) * inverse
    return found


def _largest_first(begin: Ints, end: Ints, row: Ints, at: Ints) -> Iterator[tuple[int, int]]:
    """The ranges [begin, end) of `row` as `groups` takes them; of those with the same rows only the first."""
    random = np.random.default_rng(0).integers(0, 1 << 63, int(row.max()) + 1, dtype=np.uint64)
    rows_sum = np.r_[np.zeros(1, np.uint64), np.cumsum(random[row])]
    at_sum = np.r_[0, np.cumsum(at)]
    order = np.lexsort((at_sum[end] - at_sum[begin], begin - end))
    same_rows = (rows_sum[end] - rows_sum[begin])[order]
    chosen = order[np.sort(np.unique(same_rows, return_index=True)[1])]
    return zip(begin[chosen].tolist(), end[chosen].tolist(), strict=True)
