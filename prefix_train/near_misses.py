"""Examples whose beginnings differ in a few tokens only, as in a date or an id, so that what follows is not shared.

A fork is a place up to which some examples are alike and where they go on with different tokens. Examples that meet
again behind it, each after at most STRETCH tokens of its own, with at least FOLLOW equal tokens, nearly share what
follows. Each different stretch is a variant. Questions and items differ too, behind long instructions and before a turn
that they have in common: stretches of which nearly every example has its own are a near miss only where much follows
them, see SEVERAL and BEHIND.

What a near miss saves is exact: the positions that the first epoch's plan would have less if these examples all had the
shortest stretch (of equal ones the first in the data). Before that is known, and beside it, stands what the tree of all
examples would have less: their tokens, each shared beginning once. Merging is done to the tree before looking further
down, so that a second difference behind a first one is found too. An image is one token of a stretch, of whatever size,
and counts with all its placeholders where tokens are counted. The data is never changed. N examples, R rows: the
different ways to go on from a fork. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import count
from typing import Any

import numpy as np

from configs.wording import counted, shown
from prefix_train import meetings
from prefix_train.merging import Merger, merged
from prefix_train.tree import Ints, Node, Trie

STRETCH = 48
"""Most tokens of a differing stretch: an identifier of 36 characters, one token each, with room."""

SEVERAL, BEHIND = 8, 4
"""A stretch that fewer than SEVERAL examples have, on average, is an example's own. What follows it counts only if that
is at least the BEHIND-th part of what is before it."""

FOLLOW = 32
"""Least equal tokens behind it: more than the turns of a chat template have."""

NAMED = 3
"""Examples that are named for each variant."""

AROUND = 12
"""Tokens that are shown before and after a difference."""

SHOWN = 5
"""Near misses that the text shows; JSON has LISTED, and as many variants of each."""

LISTED = 20

Below = tuple[int, tuple[int, ...]]
"""How many examples have a node, and the first of them."""


Path = tuple[()] | tuple[Any, Ints]
"""Of a node: that of its parent, and its keys, which are shared by all below it."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where examples go on differently, once what was found before it is merged.

    path: of the node up to there. ways: keys from there through what follows the differing stretch, the shortest first.
    more: how many placeholders each image has beside its key. number: the how manieth this is of those found.
    """

    path: Path
    ways: tuple[Ints, ...]
    more: Mapping[int, int]
    number: int

    @property
    def fork(self) -> Ints:
        """Keys up to there. Made anew each time: those of a long beginning with many near misses would fill memory."""
        return _keys(self.path)

    def whole(self) -> tuple[Ints, list[Ints]]:
        """Fork and ways with all placeholders of images."""
        return self._unfolded(self.fork), [self._unfolded(way) for way in self.ways]

    def leads_to(self, other: Place, beyond: bool = False) -> bool:
        """Whether `other`, found later, is at the same fork, or has a way through what merging makes of this one.

        beyond: or whether it has a way that ends within that, so that what merging it moves may come through it.
        """
        if not _leads_through(other.path, self.path):
            return False
        behind, through = _keys(other.path, self.path), self.ways[0]
        if not len(behind):
            return True
        begun = min(len(through), len(behind))
        if not np.array_equal(through[:begun], behind[:begun]):
            return False
        rest = through[begun:]
        ends = [min(len(way), len(rest)) if beyond else len(rest) for way in other.ways]
        return any(np.array_equal(way[:end], rest[:end]) for way, end in zip(other.ways, ends, strict=True))

    def _unfolded(self, keys: Ints) -> Ints:
        return np.repeat(keys, [1 + self.more.get(key, 0) for key in keys.tolist()]) if self.more else keys


@dataclass(frozen=True, eq=False)
class Variant:
    """One differing stretch: its keys, of each image one, how many tokens that is, how many examples have it, and the
    first of them by their number."""

    keys: Ints
    tokens: int
    examples: int
    first: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class NearMiss:
    """Examples that are alike but for a stretch.

    alike: tokens before it. before, after: keys beside it. variants: the most frequent first. saves, saves_in_tree: see
    the module; the same until `planned`. place: where it is.
    """

    alike: int
    before: Ints
    variants: tuple[Variant, ...]
    after: Ints
    saves: int
    saves_in_tree: int
    place: Place


def find(trie: Trie, stretch: int = STRETCH, follow: int = FOLLOW) -> list[NearMiss]:
    """All near misses among the examples of `trie`, those that save most first. What they name is merged in `trie`."""
    finder = _Finder(trie.top, stretch, follow)
    found: list[NearMiss] = []
    stack: list[tuple[Node, int, Ints, Path]] = [(trie.top, 0, trie.top.tokens, ())]
    while stack:
        node, depth, before, path = stack.pop()
        found += finder.at(node, depth, before, path)
        for child in reversed(node.children.values()):
            tail = np.concatenate([before, child.tokens[-AROUND:]])[-AROUND:]
            stack.append((child, depth + finder.size(child.tokens), tail, (path, child.tokens)))
    return sorted(found, key=lambda miss: -miss.saves)


def planned(found: Sequence[NearMiss], trie: Trie, positions: Callable[[Trie], int]) -> list[NearMiss]:
    """The first LISTED of `found` with what each saves in a plan, those that save most first.

    trie: all examples as they are. positions: those of the plan of a tree. Where a near miss is only seen once others
    before it are equal, these are equal in both plans that are compared.
    """
    whole: dict[tuple[Place, ...], int] = {(): positions(trie)}

    def of(places: tuple[Place, ...]) -> int:
        if places not in whole:
            whole[places] = positions(merged(trie, [place.whole() for place in places]))
        return whole[places]

    compared = []
    for miss in found[:LISTED]:
        needed = _needed(miss.place, [other.place for other in found])
        compared.append(replace(miss, saves=of(needed) - of((*needed, miss.place))))
    return sorted(compared, key=lambda miss: (-miss.saves, -miss.saves_in_tree))


def _needed(place: Place, others: Sequence[Place]) -> tuple[Place, ...]:
    """Those of `others` that have to be merged before there is `place`, in order."""
    needed = {place}
    for other in sorted(others, key=lambda one: -one.number):
        if any(other.number < one.number and other.leads_to(one, beyond=one is not place) for one in needed):
            needed.add(other)
    return tuple(sorted(needed - {place}, key=lambda one: one.number))


@dataclass(frozen=True, eq=False)
class _Rows:
    """The R ways to go on from a fork, as far as a difference and what follows it reach.

    keys: [R, window] int64, the first `length` of each row. branch: [R] which child of the fork, ascending. below: the
    examples of each.
    """

    keys: Ints
    length: Ints
    branch: Ints
    below: list[Below]


class _Finder(Merger):
    """Looks at the forks of one trie, and merges what it has found there."""

    def __init__(self, top: Node, stretch: int, follow: int) -> None:
        self._stretch, self._follow = stretch, follow
        self._below: dict[Node, Below] = {}
        self._more: dict[int, int] = {}
        self._numbers = count()
        order = [top]
        for node in order:
            node.tokens = self._folded(node.tokens)
            order.extend(node.children.values())
        for node in reversed(order):
            self._count(node)

    def size(self, keys: Ints) -> int:
        """The tokens that `keys` stand for: an image has one key here."""
        if not self._more:
            return len(keys)
        return len(keys) + sum(self._more[image] for image in keys[keys < 0].tolist())

    def _folded(self, keys: Ints) -> Ints:
        """`keys` with one for each image, whose placeholders all have the same; how many it has more is kept."""
        if not (keys < 0).any():
            return keys
        begin = np.flatnonzero(np.r_[True, (keys[1:] != keys[:-1]) | (keys[1:] >= 0)])
        for key, times in zip(keys[begin].tolist(), np.diff(np.r_[begin, len(keys)]).tolist(), strict=True):
            if key < 0:
                self._more[key] = times - 1
        return keys[begin]

    def at(self, fork: Node, depth: int, before: Ints, path: Path) -> Iterator[NearMiss]:
        """The near misses at the end of `fork`, `depth` tokens into the examples, until there are none."""
        merged = True
        while merged and len(fork.children) > 1:
            merged = False
            rows = self._rows(fork)
            for members, offsets in meetings.groups(rows.keys, rows.length, rows.branch, self._stretch, self._follow):
                variants = _variants(rows, members, offsets, self.size)
                after = rows.keys[members[0], offsets[0] : offsets[0] + self._follow]
                ways = [np.concatenate([variant.keys, after]) for variant in variants]
                if self._ordinary(fork, depth, variants, ways) or (saves := self.merge(fork, ways)) is None:
                    continue
                merged = True
                frequent_first = sorted(variants, key=lambda variant: (-variant.examples, variant.first))
                place = Place(path, tuple(ways), self._more, next(self._numbers))
                yield NearMiss(depth, before, tuple(frequent_first), after[:AROUND].copy(), saves, saves, place)
            if merged:
                self._count_again(fork)

    def _ordinary(self, fork: Node, depth: int, variants: Sequence[Variant], ways: Sequence[Ints]) -> bool:
        """Whether these stretches are what the examples are about, and no near miss; see the module."""
        if len(variants) * SEVERAL <= sum(variant.examples for variant in variants):
            return False
        ends = [path[-1] for way in ways if (path := self.locate(fork, way))]
        follows = self.size(ways[0][len(variants[0].keys) :]) * (len(ends) - 1)
        follows += sum(self._behind(ends[0], end) for end in ends[1:])
        return follows * BEHIND < depth * (len(ends) - 1)

    def _behind(self, one: Node, other: Node) -> int:
        """Tokens that follow both."""
        pairs = [(child, other.children.get(token)) for token, child in one.children.items()]
        return sum(self.alike(mine, theirs) for mine, theirs in pairs if theirs is not None)

    def _rows(self, fork: Node) -> _Rows:
        window = self._stretch + self._follow
        found: list[tuple[Ints, int, Below]] = []
        for branch, child in enumerate(fork.children.values()):
            stack: list[tuple[Node, Ints]] = [(child, child.tokens[:window])]
            while stack:
                node, path = stack.pop()
                if len(path) == window or not node.children:
                    found.append((path, branch, self._below[node]))
                    continue
                if node.ends:
                    found.append((path, branch, _below(node.ends, [])))
                for below in reversed(node.children.values()):
                    stack.append((below, np.concatenate([path, below.tokens[: window - len(path)]])))
        keys = np.zeros((len(found), window), np.int64)
        for row, (path, _, _) in enumerate(found):
            keys[row, : len(path)] = path
        return _Rows(
            keys,
            np.array([len(path) for path, _, _ in found], np.int64),
            np.array([branch for _, branch, _ in found], np.int64),
            [below for _, _, below in found],
        )

    def split(self, node: Node, at: int) -> None:
        self._below[node.split(at)] = self._below[node]

    def united(self, into: Node, moved: Node) -> None:
        self._below[into] = _below((), [self._below[into], self._below[moved]])

    def _count_again(self, fork: Node) -> None:
        """Count anew as far below `fork` as examples have been moved from one node to another."""
        order = [(fork, 0)]
        for node, depth in order:
            if depth < self._stretch + self._follow:
                order += [(child, depth + len(child.tokens)) for child in node.children.values()]
        for node, depth in reversed(order):
            if depth < self._stretch + self._follow:
                self._count(node)

    def _count(self, node: Node) -> None:
        self._below[node] = _below(node.ends, [self._below[child] for child in node.children.values()])


def _keys(path: Path, above: Path = ()) -> Ints:
    """The keys of `path` behind those of `above`, which is the path of a node that it leads through."""
    parts: list[Ints] = []
    while path and path is not above:
        path, keys = path
        parts.append(keys)
    return np.concatenate([np.empty(0, np.int64), *reversed(parts)])


def _leads_through(path: Path, above: Path) -> bool:
    """Whether `above`, of the same walk, is the path of a node that `path` leads through or ends with."""
    while path and path is not above:
        path = path[0]
    return bool(path) or not above


def _below(ends: Sequence[int], parts: Sequence[Below]) -> Below:
    first = nsmallest(NAMED, [*ends, *(example for _, some in parts for example in some)])
    return len(ends) + sum(count for count, _ in parts), tuple(first)


def _variants(rows: _Rows, members: Ints, offsets: Ints, size: Callable[[Ints], int]) -> list[Variant]:
    """The different stretches of a group, the shortest first, then in the order of the data."""
    found: defaultdict[bytes, list[int]] = defaultdict(list)
    for row, offset in zip(members.tolist(), offsets.tolist(), strict=True):
        found[rows.keys[row, :offset].tobytes()].append(row)
    variants = []
    for keys, having in found.items():
        count, first = _below((), [rows.below[row] for row in having])
        stretch = np.frombuffer(keys, np.int64)
        variants.append(Variant(stretch, size(stretch), count, first))
    return sorted(variants, key=lambda variant: (variant.tokens, variant.first))


def summary(found: Sequence[NearMiss], sources: Sequence[str], text_of: Callable[[Ints], str]) -> list[dict[str, Any]]:
    """Near misses as JSON has them. sources: [N] `file:line`; text_of: keys -> text."""
    return [
        {
            "tokens_before": miss.alike,
            "before": text_of(miss.before),
            "after": text_of(miss.after),
            "examples": sum(variant.examples for variant in miss.variants),
            "saves": miss.saves,
            "saves_in_tree": miss.saves_in_tree,
            "variant_count": len(miss.variants),
            "variants": [
                {
                    "text": text_of(variant.keys),
                    "tokens": variant.tokens,
                    "examples": variant.examples,
                    "sources": [sources[example] for example in variant.first],
                }
                for variant in miss.variants[:LISTED]
            ],
        }
        for miss in found[:LISTED]
    ]


def describe(found: Sequence[dict[str, Any]]) -> str:
    """The near misses of `summary` in a few lines, each beginning with a line break; empty where there are none."""
    lines: list[str] = []
    for miss in found[:SHOWN]:
        lines.append(f"{'nearly shared':<14}{sentence(miss)}:")
        lines.append(f"{'':<14}  {shown(miss['before'])} _ {shown(miss['after'])}")
        for variant in miss["variants"][:NAMED]:
            lines.append(
                f"{'':<14}  {shown(variant['text'])}: {counted(variant['examples'], 'time')}, {variant['sources'][0]}"
            )
        if (more := miss["variant_count"] - NAMED) > 0:
            lines.append(f"{'':<14}  and {more:,} more")
    if (more := len(found) - SHOWN) > 0:
        lines.append(f"{'nearly shared':<14}{more} more: see --json")
    return "".join(f"\n{line}" for line in lines)


def sentence(miss: Mapping[str, Any]) -> str:
    """One of `summary` in a sentence."""
    return (
        f"{counted(miss['examples'], 'example')} differ in {counted(miss['variant_count'], 'short text')} after "
        f"{counted(miss['tokens_before'], 'equal token')}; were these texts equal, this plan would have "
        f"{counted(max(0, miss['saves']), 'position')} less"
    )
