"""Forests for the tests of the token mixers, and what each says about an example alone: its root path."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from prefix_train.layout import Layout

LENGTHS = (1, 2, 3, 4, 63, 64, 65, 130)
"""Around the width of the convolution and the length of a chunk."""

FIVE_DEEP = ([64, 3, 1, 65, 2, 1, 130, 4, 1, 63], [-1, 0, 1, 1, 3, 4, 3, 0, 7, -1])
"""Two roots; a path of five segments; segments of one token below others of one token."""

FORK = ([70, 5, 20, 20, 3, 1, 7], [-1, 0, 1, 1, 0, 0, -1])

MANY_SHORT = ([9, *[1] * 40], [-1, *[0] * 40])

SHAPES = {
    "one segment": ([65], [-1]),
    "one token": ([1], [-1]),
    "roots alone": ([3, 64, 64, 1], [-1, -1, -1, -1]),
    "prefix": ([130, 20, 20, 20, 1, 20], [-1, 0, 0, 0, 0, 0]),
    "many short": MANY_SHORT,
    "chain of single tokens": ([1, 1, 1, 1, 1, 2], [-1, 0, 1, 2, 3, 4]),
    "five deep": FIVE_DEEP,
}


def random_tree(seed: int, depth: int, most: int = 12) -> tuple[list[int], list[int]]:
    """Lengths and parents of a random forest in depth-first order; one path has `depth` segments, none has more."""
    draw = random.Random(seed)
    lengths, parents, depths = [], [], []
    for index in range(max(depth, draw.randint(depth, most))):
        deepest = depths[-1] if depths else 0
        level = index + 1 if index < depth else draw.randint(1, min(depth, deepest + 1))
        parents.append(max((i for i, d in enumerate(depths) if d == level - 1), default=-1))
        lengths.append(draw.choice(LENGTHS))
        depths.append(level)
    return lengths, parents


def path_rows(layout: Layout, segment: int) -> Tensor:
    """Buffer rows of the tokens from the root to the end of `segment`."""
    spans = [range(layout.starts[s], layout.starts[s] + layout.lengths[s]) for s in layout.root_path(segment)]
    return torch.tensor([row for span in spans for row in span])


def leaves(layout: Layout) -> list[int]:
    """Segments without children: together their root paths cover the buffer."""
    return [segment for segment in range(len(layout.lengths)) if segment not in set(layout.parents)]


def standalone(layout: Layout, along_path: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """What a mixer gives when every root path is a sequence of its own.

    along_path(*inputs) computes one sequence; inputs and output have the tokens in dimension 0. A token of several
    paths is taken from the first.
    """
    out: dict[int, Tensor] = {}
    for leaf in leaves(layout):
        rows = path_rows(layout, leaf)
        alone = along_path(*(x[rows] for x in inputs))
        for place, row in enumerate(rows.tolist()):
            out.setdefault(row, alone[place])
    return torch.stack([out[row] for row in range(layout.total)])


def chain(layout: Layout) -> Layout:
    """The fault of ignored boundaries: every segment goes on from the one before it in the buffer."""
    return Layout.from_tree(layout.lengths, range(-1, len(layout.lengths) - 1), width=layout.width)


def relative(mine: Tensor, truth: Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    mine, truth = mine.detach(), truth.detach()
    return float((mine.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-300))


def assert_close(mine: Sequence[Tensor], truth: Sequence[Tensor], bound: float, names: Sequence[str]) -> None:
    """Every tensor within `bound`, relatively."""
    errors = {name: relative(a, b) for name, a, b in zip(names, mine, truth, strict=True)}
    assert all(error <= bound for error in errors.values()), errors


def ranges(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Half-open ranges of consecutive lengths."""
    edges = [0]
    for length in lengths:
        edges.append(edges[-1] + length)
    return list(pairwise(edges))
