"""Best fit over a forest: put examples into packs under a cap on positions, so that those that share meet.

Works from the leaves up. Below every node its segments are put into bins by best fit; a bin becomes one segment (the
node's tokens, then its children) for the bins of the node above, and the bins above the roots are the packs. So a
prefix is repeated only where one pack cannot hold all that continues it. No torch, nothing random: `order` decides
between examples of about equal size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from prefix_train.budget import visible_pairs
from prefix_train.tree import Forest


@dataclass(frozen=True, slots=True)
class Pack:
    """One buffer: a forest of segments in depth-first order.

    lengths, parents: [S] as `Layout.from_tree` takes them. origin: [S] (example, start) where each segment's tokens
    are copied from; the example is a member. members: the examples. paths: for each member the indices of its
    segments, root first. positions: tokens in the buffer. logical: sum of the members' lengths. pairs: visible pairs.
    A pack without members is empty: a rank that has none left still takes part in every collective.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    origin: tuple[tuple[int, int], ...]
    members: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    positions: int
    logical: int
    pairs: int


EMPTY = Pack((), (), (), (), (), 0, 0, 0)


class Segment:
    """Tokens `start` to `end` of every example below, what continues them, and the examples that end with them.

    size: positions of the segment and all below it. first: one example that has the segment.
    """

    __slots__ = ("children", "end", "first", "members", "size", "start")

    start: int
    end: int
    size: int
    first: int
    children: Sequence[Segment]
    members: Sequence[int]

    def __init__(self, start: int, end: int, children: Sequence[Segment], members: Sequence[int]) -> None:
        self.start, self.end, self.children, self.members = start, end, children, members
        self.size = end - start + sum([child.size for child in children]) if children else end - start
        self.first = members[0] if members else children[0].first


def examples_of(segments: Iterable[Segment]) -> list[int]:
    """The examples that end in or below some segments, in depth-first order."""
    members: list[int] = []
    stack = list(segments)[::-1]
    while stack:
        segment = stack.pop()
        members += segment.members
        stack += reversed(segment.children)
    return members


def standalone(example: int, length: int) -> Pack:
    """One example in a buffer of its own."""
    return Pack((length,), (-1,), ((example, 0),), (example,), ((0,),), length, length, visible_pairs([length], [-1]))


def pack_of(roots: Sequence[Segment], example_lengths: Sequence[int]) -> Pack:
    """The buffer that holds `roots` and all below them."""
    lengths: list[int] = []
    parents: list[int] = []
    origin: list[tuple[int, int]] = []
    members: list[int] = []
    ends: list[tuple[int, ...]] = []
    paths: list[tuple[int, ...]] = []
    stack = list(zip(reversed(roots), repeat(-1)))
    while stack:
        segment, parent = stack.pop()
        index = len(lengths)
        path = (*paths[parent], index) if parent >= 0 else (index,)
        lengths.append(segment.end - segment.start)
        parents.append(parent)
        origin.append((segment.first, segment.start))
        paths.append(path)
        members += segment.members
        ends += [path] * len(segment.members)
        if segment.children:
            stack += zip(reversed(segment.children), repeat(index))
    logical = sum(map(example_lengths.__getitem__, members))
    pairs = visible_pairs(lengths, parents)
    return Pack(
        tuple(lengths), tuple(parents), tuple(origin), tuple(members), tuple(ends), sum(lengths), logical, pairs
    )


class Selection:
    """Some examples of a forest: which end with which node, and the nodes on their paths, children first."""

    __slots__ = ("ends", "nodes")

    def __init__(self, ends: dict[int, list[int]], nodes: list[int]) -> None:
        self.ends, self.nodes = ends, nodes


class Packer:
    """Packs sets of examples of one forest. A shared beginning that saves fewer than `min_shared` positions in a
    pack is given to each of its branches there, whatever it would save elsewhere."""

    def __init__(self, forest: Forest, min_shared: int) -> None:
        self._parent: list[int] = forest.parent.tolist()
        self._start: list[int] = forest.start.tolist()
        self._end: list[int] = forest.end.tolist()
        self._last: list[int] = forest.last.tolist()
        self._min_shared = max(1, min_shared)

    def select(self, examples: Iterable[int]) -> Selection:
        """Examples to be packed, or bounded, together."""
        ends: defaultdict[int, list[int]] = defaultdict(list)
        for example in examples:
            ends[self._last[example]].append(example)
        nodes = set(ends)
        for node in ends:
            above = self._parent[node]
            while above >= 0 and above not in nodes:
                nodes.add(above)
                above = self._parent[above]
        return Selection(dict(ends), sorted(nodes, reverse=True))

    def pack(
        self, selection: Selection, max_positions: int, order: Sequence[int], per_pack: int = 0
    ) -> list[list[Segment]]:
        """Packs, each as its root segments; no example may be longer than `max_positions`.

        Large ones first, to the quarter octave; within one, `order[example]` decides, so that another order makes
        other examples meet. per_pack: positions that one pack less is worth where that means to repeat a root.
        """
        ends = selection.ends
        waiting: defaultdict[int, list[Segment]] = defaultdict(list)
        for node in selection.nodes:
            start, end, parent = self._start[node], self._end[node], self._parent[node]
            if node not in waiting:
                waiting[parent].append(Segment(start, end, (), ends[node]))
                continue
            here: Sequence[int] = ends.get(node, ())
            for children in self._best_fit(waiting.pop(node), max_positions - end, end, order):
                waiting[parent] += self._settle(start, end, children, here)
                here = ()
        return self._best_fit(waiting[-1], max_positions, per_pack, order)

    def bound(self, selection: Selection) -> Bound:
        """What any packing of these examples needs at least."""
        return Bound(selection.nodes, self._parent, self._start, self._end)

    def _settle(self, start: int, end: int, children: list[Segment], members: Sequence[int]) -> list[Segment]:
        """One segment with these children if sharing its tokens saves enough here, else its tokens go to each."""
        if (end - start) * (len(children) + bool(members) - 1) >= self._min_shared:
            return [Segment(start, end, children, members)]
        for child in children:
            child.start = start
            child.size += end - start
        return [Segment(start, end, (), members), *children] if members else children

    def _settled_size(self, own: int, children: Sequence[Segment], ended: bool) -> int:
        """Positions of what `_settle` would return."""
        branches = len(children) + ended
        shared = own * (branches - 1) >= self._min_shared
        return sum([child.size for child in children]) + (own if shared else own * branches)

    def _best_fit(self, items: list[Segment], room: int, above: int, order: Sequence[int]) -> list[list[Segment]]:
        """Put `items` into bins of `room` positions; a further bin repeats the `above` tokens before them."""
        bins: list[list[Segment]] = []
        free: list[tuple[int, int]] = []
        todo = sorted(items, key=lambda item: (-(item.size**4).bit_length(), order[item.first]), reverse=True)
        while todo:
            item = todo.pop()
            fits = bisect_left(free, (item.size, 0))
            if fits < len(free):
                left, index = free.pop(fits)
            elif free and item.children and (parts := self._split(item, free[-1][0], room, above)):
                left, index = free.pop()
                moved, rest = parts
                todo += rest
                bins[index] += moved
                insort(free, (left - sum([part.size for part in moved]), index))
                continue
            else:
                left, index = room, len(bins)
                bins.append([])
            bins[index].append(item)
            insort(free, (left - item.size, index))
        return bins

    def _split(self, group: Segment, left: int, room: int, above: int) -> tuple[list[Segment], list[Segment]] | None:
        """Children of `group` to move into the `left` positions of an open bin, and what remains.

        None where the positions that this adds are not worth the part of a new bin, and so of another copy of the
        `above` tokens, that it saves.
        """
        own = group.end - group.start
        moved: list[Segment] = []
        kept: list[Segment] = []
        unused = left - own
        for child in group.children:
            fits = child.size <= unused
            (moved if fits else kept).append(child)
            unused -= child.size if fits else 0
        while moved and self._settled_size(own, moved, False) > left:
            kept.append(moved.pop())
        if not moved:
            return None
        moved_size = self._settled_size(own, moved, False)
        kept_size = self._settled_size(own, kept, bool(group.members))
        added, freed = moved_size + kept_size - group.size, group.size - kept_size
        if added * room >= above * freed:
            return None
        first = self._settle(group.start, group.end, moved, [])
        return first, self._settle(group.start, group.end, kept, group.members)


class Bound:
    """The least that any packing of some examples needs, from how often each prefix has to be repeated."""

    def __init__(self, nodes: Sequence[int], parent: Sequence[int], start: Sequence[int], end: Sequence[int]) -> None:
        inner = sorted({parent[node] for node in nodes}, reverse=True)
        slot = {node: row for row, node in enumerate(inner)}
        self._leaves = [0] * len(inner)
        for node in nodes:
            if node not in slot:
                self._leaves[slot[parent[node]]] += end[node] - start[node]
        self._inner = [(end[node] - start[node], end[node], slot[parent[node]]) for node in inner if node >= 0]

    def at(self, max_positions: int) -> tuple[int, int]:
        """(packs, positions) that no packing under this cap can go below."""
        below = list(self._leaves)
        copies = [1] * len(below)
        for row, (own, end, above) in enumerate(self._inner):
            repeated = max(copies[row], -(-below[row] // (max_positions - end)))
            below[above] += below[row] + own * repeated
            copies[above] = max(copies[above], repeated)
        return max(copies[-1], -(-below[-1] // max_positions)), below[-1]
