"""A pack drawn as a tree, to scale: each segment a bar as wide as it is long, in the order of the buffer, below the one
that it continues. Branches that are too narrow to be seen are drawn together, so that a picture stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup

from configs.wording import counted
from prefix_train.packing import Pack
from prefix_train.results import charts
from prefix_train.results.charts import COLOURS, WIDTH, Chart, visible

NARROW = 0.8
"""Branches below this width, for each level of the tree, are drawn together: a bound on how many bars there are."""

TALLEST, ROW, GAP = 480, 22, 4
"""Height of the tree at most, of a row, and between rows, where they have room."""

LABELLED = 36
"""From this width on, a bar shows its tokens."""

TOLD = 12
"""Segments, the longest, whose first words are told."""


@dataclass(frozen=True)
class Tree:
    """What of a pack of S segments is drawn, [S] each.

    begin: the position of each segment's first token; own and whole: where it ends by itself, and with all below it;
    depth: 0 for a root; examples: those that go through it; branch: segments in it and below it; children: of each its
    children in order.
    """

    begin: list[int]
    own: list[int]
    whole: list[int]
    depth: list[int]
    examples: list[int]
    branch: list[int]
    children: list[list[int]]

    @classmethod
    def of(cls, pack: Pack) -> Tree:
        """The tree of `pack`."""
        count = len(pack.lengths)
        own = list(accumulate(pack.lengths))
        begin = [end - length for end, length in zip(own, pack.lengths, strict=True)]
        whole, depth, examples, branch = list(own), [0] * count, [0] * count, [1] * count
        children: list[list[int]] = [[] for _ in range(count)]
        for path in pack.paths:
            examples[path[-1]] += 1
        for segment, parent in enumerate(pack.parents):
            if parent >= 0:
                depth[segment] = depth[parent] + 1
                children[parent].append(segment)
        for segment in range(count - 1, -1, -1):
            parent = pack.parents[segment]
            if parent >= 0:
                whole[parent] = max(whole[parent], whole[segment])
                examples[parent] += examples[segment]
                branch[parent] += branch[segment]
        return cls(begin, own, whole, depth, examples, branch, children)


@dataclass(frozen=True)
class Bar:
    """One bar: positions [begin, end) at a depth, and in words; `whole` to where what continues it reaches."""

    begin: int
    end: int
    whole: int
    depth: int
    words: str


def draw(key: str, title: str, pack: Pack, words_of: Callable[[int], str]) -> Chart:
    """The picture of `pack`. words_of: which text a segment begins with and which example it is of."""
    tree = Tree.of(pack)
    depth = 1 + max(tree.depth)
    row = min(ROW, TALLEST // depth - GAP) if depth * (ROW + GAP) > TALLEST else ROW
    scale = WIDTH / pack.positions
    parts = []
    for bar in bars(pack, tree, NARROW * depth / scale, words_of):
        left, top, colour = bar.begin * scale, bar.depth * (row + GAP), bar.depth % COLOURS
        width = max(0.3, (bar.end - bar.begin) * scale - min(0.5, 0.2 * (bar.end - bar.begin) * scale))
        if bar.whole > bar.end:
            parts.append(
                Markup('<rect class="below s{}" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>').format(
                    colour, bar.end * scale, top, (bar.whole - bar.end) * scale, row
                )
            )
        parts.append(
            Markup(
                '<rect class="segment s{}" x="{:.2f}" y="{}" width="{:.2f}" height="{}"><title>{}</title></rect>'
            ).format(colour, left, top, width, row, visible(bar.words))
        )
        if width >= LABELLED and row >= 14:
            parts.append(
                Markup('<text class="mid inside" x="{:.1f}" y="{:.1f}">{}</text>').format(
                    left + width / 2, top + row / 2 + 4, charts.short(bar.end - bar.begin)
                )
            )
    height = depth * (row + GAP) - GAP + 16
    begin = Markup('<text x="0" y="{0}">0</text><text class="end" x="{1}" y="{0}">{2} positions</text>')
    parts.append(begin.format(height - 3, WIDTH, f"{pack.positions:,}"))
    words = (
        f"{counted(len(pack.members), 'example')}, {counted(len(pack.lengths), 'segment')}, at most {depth} deep: "
        f"{pack.positions:,} positions for {pack.logical:,} logical tokens, "
        f"{pack.logical / pack.positions:.1f} times fewer",
    )
    return Chart(title, charts.picture(key, title, words[0], parts, height), words)


def bars(pack: Pack, tree: Tree, narrow: float, words_of: Callable[[int], str]) -> Iterator[Bar]:
    """The bars of `pack`: branches of fewer than `narrow` positions, one after the other below one segment, as one."""
    longest = sorted(range(len(pack.lengths)), key=lambda segment: -pack.lengths[segment])[:TOLD]
    told = set(longest)
    stack = [[segment for segment, parent in enumerate(pack.parents) if parent < 0]]
    while stack:
        together: list[int] = []
        for segment in stack.pop():
            if tree.whole[segment] - tree.begin[segment] < narrow:
                if together and tree.whole[segment] - tree.begin[together[0]] >= 2 * narrow:
                    yield _several(tree, together)
                    together = []
                together.append(segment)
                continue
            if together:
                yield _several(tree, together)
                together = []
            yield _one(pack, tree, segment, words_of(segment) if segment in told else "")
            stack.append(tree.children[segment])
        if together:
            yield _several(tree, together)


def _one(pack: Pack, tree: Tree, segment: int, words: str) -> Bar:
    begin, end = tree.begin[segment], tree.own[segment]
    said = f"{counted(end - begin, 'token')} at positions {begin:,} to {end - 1:,}; {_examples(tree.examples[segment])}"
    return Bar(begin, end, tree.whole[segment], tree.depth[segment], said + (f"; {words}" if words else ""))


def _several(tree: Tree, segments: list[int]) -> Bar:
    begin, end = tree.begin[segments[0]], tree.whole[segments[-1]]
    examples = sum(tree.examples[segment] for segment in segments)
    count = sum(tree.branch[segment] for segment in segments)
    words = f"{counted(count, 'segment')} drawn together: {end - begin:,} tokens; {_examples(examples)}"
    return Bar(begin, end, end, tree.depth[segments[0]], words)


def _examples(count: int) -> str:
    return "one example" if count == 1 else f"{count:,} examples"
