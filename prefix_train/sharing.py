"""What examples share at their beginnings, whatever the packs: how much, which beginnings, and what packs of other
sizes would make of it. N examples, n nodes. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from configs.wording import counted, shown
from prefix_train.packing import Packer
from prefix_train.tree import Forest, Ints

NAMED, LEAST = 12, 0.001
"""Beginnings that are listed: so many at most, and those that save less than such a part of all tokens only as the
first."""

FIRST = 24
"""Tokens of a beginning that are shown."""


@dataclass(frozen=True)
class Beginning:
    """Tokens [start, start + tokens) that some examples share, and no more of them share what follows.

    first: one of the examples. saves: tokens that a pack of all of them has less than each alone.
    """

    start: int
    tokens: int
    examples: int
    first: int

    @property
    def saves(self) -> int:
        return self.tokens * (self.examples - 1)


@dataclass(frozen=True)
class Size:
    """The least packs and positions that any plan has with packs of at most `max_positions`."""

    max_positions: int
    packs: int
    positions: int


def examples_below(forest: Forest) -> Ints:
    """[n] examples whose path goes through each node."""
    counts = np.bincount(forest.last, minlength=len(forest.parent)).tolist()
    parents = forest.parent.tolist()
    for node in range(len(counts) - 1, -1, -1):
        if parents[node] >= 0:
            counts[parents[node]] += counts[node]
    return np.array(counts, np.int64)


def shared_part(forest: Forest) -> float:
    """The part of all examples' tokens that at least one more example begins with."""
    below = examples_below(forest)
    shared = int((forest.length * below)[below > 1].sum())
    return shared / int(forest.lengths.sum())


def beginnings(forest: Forest) -> list[Beginning]:
    """Every shared beginning, those that save most first."""
    below = examples_below(forest)
    nodes = np.flatnonzero(below > 1)
    order = nodes[np.argsort(-(forest.length * (below - 1))[nodes], kind="stable")]
    return [
        Beginning(int(forest.start[node]), int(forest.length[node]), int(below[node]), int(forest.source[node]))
        for node in order.tolist()
    ]


def sizes(forest: Forest, min_shared: int, around: int) -> list[Size]:
    """Packs of a quarter to four times `around`, as far as they hold every example."""
    packer, longest = Packer(forest, min_shared), int(forest.lengths.max())
    bound = packer.bound(packer.select(range(len(forest))))
    given = [size for size in (around // 4, around // 2, around, 2 * around, 4 * around) if size >= longest]
    return [Size(size, *bound.at(size)) for size in given]


def summary(forest: Forest, sources: Sequence[str], text_of: Callable[[int, int, int], str]) -> dict[str, Any]:
    """What is shared, as JSON has it. text_of: (example, first token, how many) -> text."""
    found = beginnings(forest)
    enough = LEAST * int(forest.lengths.sum())
    return {
        "part": shared_part(forest),
        "beginnings": len(found),
        "largest": [
            {
                "start": one.start,
                "tokens": one.tokens,
                "examples": one.examples,
                "saves": one.saves,
                "source": sources[one.first],
                "text": text_of(one.first, one.start, min(FIRST, one.tokens)),
            }
            for place, one in enumerate(found[:NAMED])
            if not place or one.saves >= enough
        ],
    }


def describe(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What `summary` found, as rows of a name and a text."""
    if not found["beginnings"]:
        return [("shared", "nothing: no two examples begin alike for long enough")]
    rows = [
        (
            "shared",
            f"{found['part']:.1%} of the examples' tokens are in {counted(found['beginnings'], 'beginning')} that at "
            "least two of them share",
        )
    ]
    for one in found["largest"][:3]:
        size = f"{counted(one['tokens'], 'token')} x {counted(one['examples'], 'example')}"
        rows.append(("", f"{size}, {shown(one['text'])} ({one['source']})"))
    return rows
