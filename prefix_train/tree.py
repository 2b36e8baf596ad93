"""Find what token sequences share at their beginnings: a compressed trie, exact, built in one pass.

N examples, n nodes. Keys are token ids, except inside an image, where they are negative hashes of its pixels: equal
keys mean equal inputs. Each example is read once and compared with what is there by whole arrays, so the time is that
of reading the tokens, and the memory is that of the tokens that differ. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Forest:
    """Shared beginnings of N examples: n nodes in depth-first order, every parent before its children.

    parent: [n] index of each node's parent, -1 for a root. length: [n] its tokens, at least 1.
    source, start: [n] its tokens are `keys[source][start : start + length]`, and `start` is the same in every example
    that has the node. last: [N] the node that each example ends with; its path is that node and all above it.
    """

    parent: Ints
    start: Ints
    length: Ints
    source: Ints
    last: Ints

    def __post_init__(self) -> None:
        nodes = np.arange(len(self.parent))
        inner = self.parent >= 0
        if not (self.parent.shape == self.start.shape == self.length.shape == self.source.shape == nodes.shape):
            raise ValueError("a forest's node tables have different lengths")
        if (self.parent < -1).any() or (self.parent >= nodes).any() or (self.length < 1).any():
            raise ValueError("a forest's parents must come before their children, and lengths be at least 1")
        above = self.parent[inner]
        if (self.start[~inner] != 0).any() or (self.start[inner] != self.start[above] + self.length[above]).any():
            raise ValueError("a forest's nodes must begin where their parents end")
        for table, size in ((self.last, len(nodes)), (self.source, len(self))):
            if ((table < 0) | (table >= size)).any():
                raise ValueError("a forest names a node or an example that is not there")

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.last)

    @property
    def end(self) -> Ints:
        """[n] tokens from the root through each node's last one."""
        return self.start + self.length

    @property
    def lengths(self) -> Ints:
        """[N] tokens of each example."""
        return self.end[self.last]

    def path(self, example: int) -> tuple[int, ...]:
        """The nodes of one example, root first."""
        nodes = []
        node = int(self.last[example])
        while node >= 0:
            nodes.append(node)
            node = int(self.parent[node])
        return tuple(reversed(nodes))


def build_forest(keys: Iterable[Ints], min_shared: int) -> Forest:
    """The forest of `keys`, one int64 array per example, each read once and not kept.

    A shared beginning becomes a node where that saves at least `min_shared` tokens: its length x (branches - 1), where
    a branch is a child or the end of examples. Decided from the leaves up; otherwise its tokens go to each branch.
    Raises ValueError on an example without tokens.
    """
    trie = Trie()
    for example in keys:
        trie.insert(example)
    return trie.forest(min_shared)


class Node:
    """A run of tokens, what may follow it by first token, and the examples that end with it."""

    __slots__ = ("children", "ends", "source", "start", "tokens")

    def __init__(self, tokens: Ints, start: int, source: int) -> None:
        self.tokens, self.start, self.source = tokens, start, source
        self.children: dict[int, Node] = {}
        self.ends: list[int] = []

    def split(self, at: int) -> Node:
        """End after the first `at` tokens; the rest becomes the only child, and is returned."""
        rest = Node(self.tokens[at:], self.start + at, self.source)
        rest.children, rest.ends = self.children, self.ends
        self.tokens, self.children, self.ends = self.tokens[:at], {int(rest.tokens[0]): rest}, []
        return rest


class Trie:
    """A compressed trie that examples are inserted into one after the other. top: its root, without tokens."""

    def __init__(self) -> None:
        self.examples = 0
        self.top = Node(np.empty(0, np.int64), 0, 0)

    def insert(self, keys: Ints) -> None:
        """Add the next example: [L] int64, L at least 1."""
        keys = np.asarray(keys, dtype=np.int64)
        if keys.ndim != 1 or not len(keys):
            raise ValueError(f"example {self.examples} has keys of shape {keys.shape}; it needs at least one token")
        node, at = self.top, 0
        while at < len(keys):
            child = node.children.get(int(keys[at]))
            if child is None:
                child = Node(keys[at:].copy(), at, self.examples)
                node.children[int(keys[at])] = child
                at = len(keys)
            else:
                shared = common(child.tokens, keys[at:])
                if shared < len(child.tokens):
                    child.split(shared)
                at += shared
            node = child
        node.ends.append(self.examples)
        self.examples += 1

    def copy(self) -> Trie:
        """The same tree in nodes of its own; their tokens are the same arrays, which nobody writes to."""
        made = Trie()
        made.examples = self.examples
        stack = [(self.top, made.top)]
        while stack:
            node, copied = stack.pop()
            copied.ends = list(node.ends)
            for token, child in node.children.items():
                copied.children[token] = Node(child.tokens, child.start, child.source)
                stack.append((child, copied.children[token]))
        return made

    def forest(self, min_shared: int) -> Forest:
        """What has been inserted, as tables; see `build_forest` for `min_shared`."""
        parent: list[int] = []
        start: list[int] = []
        end: list[int] = []
        source: list[int] = []
        last = np.empty(self.examples, np.int64)
        stack = [(branch, -1) for branch in reversed(_branches(self.top, min_shared))]
        while stack:
            branch, above = stack.pop()
            index = len(parent)
            parent.append(above)
            start.append(end[above] if above >= 0 else 0)
            end.append(branch.node.start + len(branch.node.tokens))
            source.append(branch.node.source)
            last[branch.node.ends] = index
            stack.extend((below, index) for below in reversed(branch.below))
        starts = np.array(start, np.int64)
        return Forest(
            np.array(parent, np.int64), starts, np.array(end, np.int64) - starts, np.array(source, np.int64), last
        )


class _Branch:
    """A future node of the forest: the tokens from its parent's end to the end of `node`, and what follows."""

    __slots__ = ("below", "node")

    def __init__(self, node: Node, below: list[_Branch]) -> None:
        self.node, self.below = node, below


def _branches(top: Node, min_shared: int) -> list[_Branch]:
    """The roots of the forest, after deciding from the leaves up which nodes save enough."""
    order = [top]
    for node in order:
        order.extend(node.children.values())
    found: dict[Node, list[_Branch]] = {}
    for node in reversed(order[1:]):
        below = [branch for child in node.children.values() for branch in found.pop(child)]
        saved = len(node.tokens) * (len(below) + bool(node.ends) - 1)
        if not below or saved >= min_shared:
            found[node] = [_Branch(node, below)]
        else:
            found[node] = [_Branch(node, []), *below] if node.ends else below
    return [branch for child in top.children.values() for branch in found[child]]


def common(left: Ints, right: Ints) -> int:
    """Number of equal tokens at the beginning of both."""
    shorter = min(len(left), len(right))
    at, block = 0, 64
    while at < shorter:
        stop = min(shorter, at + block)
        differ = left[at:stop] != right[at:stop]
        first = int(differ.argmax())
        if differ[first]:
            return at + first
        at, block = stop, block * 8
    return shorter
