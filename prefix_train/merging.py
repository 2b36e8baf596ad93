"""What a tree of examples would be if some of them were equal where they differ: branches are put together.

Ways are the keys with which examples go on from a node, a fork. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefix_train.tree import Ints, Node, Trie, common


class Merger:
    """Puts branches together, and counts the tokens that a tree has less for it."""

    def size(self, keys: Ints) -> int:
        """The tokens that `keys` stand for."""
        return len(keys)

    def split(self, node: Node, at: int) -> None:
        """End `node` after so many keys; the rest becomes its child."""
        node.split(at)

    def united(self, into: Node, moved: Node) -> None:
        """Told that `into` now has the examples of `moved` too."""

    def merge(self, fork: Node, ways: Sequence[Ints]) -> int | None:
        """Give the first of `ways` to all examples that go on with one of them; the tokens that this saves.

        None, and nothing done, where no example goes on with one of them.
        """
        if not all(self.locate(fork, way) for way in ways):
            return None
        saved = 0
        for way in ways[1:]:
            path = self.locate(fork, way)
            moved = Node(fork.tokens[:0], 0, 0)
            moved.children, moved.ends = path[-1].children, path[-1].ends
            path[-1].children, path[-1].ends = {}, []
            while not path[-1].children and not path[-1].ends:
                saved += self.size(path[-1].tokens)
                del path[-2].children[int(path.pop().tokens[0])]
            saved += self._unite(self.locate(fork, ways[0])[-1], moved)
        return saved

    def locate(self, fork: Node, keys: Ints) -> list[Node]:
        """The nodes from `fork` to the one that ends with `keys`, made to end there; none where no example goes so."""
        path, at = [fork], 0
        while at < len(keys):
            child = path[-1].children.get(int(keys[at]))
            if child is None:
                return []
            shared = common(child.tokens, keys[at:])
            at += shared
            if shared < len(child.tokens):
                if at < len(keys):
                    return []
                self.split(child, shared)
            path.append(child)
        return path

    def alike(self, one: Node, other: Node) -> int:
        """Tokens with which examples below `one` go on as some below `other` do, each counted once."""
        found, stack = 0, [(one, other, 0, 0)]
        while stack:
            left, right, at, there = stack.pop()
            shared = common(left.tokens[at:], right.tokens[there:])
            found += self.size(left.tokens[at : at + shared])
            ends = at + shared == len(left.tokens), there + shared == len(right.tokens)
            lefts = list(left.children.values()) if ends[0] else []
            if ends == (True, True):
                pairs = [(mine, right.children.get(int(mine.tokens[0]))) for mine in lefts]
                stack += [(mine, theirs, 0, 0) for mine, theirs in pairs if theirs is not None]
            elif ends[0]:
                child = left.children.get(int(right.tokens[there + shared]))
                stack += [] if child is None else [(child, right, 0, there + shared)]
            elif ends[1]:
                child = right.children.get(int(left.tokens[at + shared]))
                stack += [] if child is None else [(left, child, at + shared, 0)]
        return found

    def _unite(self, into: Node, moved: Node) -> int:
        """Put what continues `moved` behind `into`; the tokens that both had."""
        saved, stack = 0, [(into, moved)]
        while stack:
            node, other = stack.pop()
            node.ends += other.ends
            for token, theirs in other.children.items():
                mine = node.children.setdefault(token, theirs)
                if mine is theirs:
                    continue
                shared = common(mine.tokens, theirs.tokens)
                for side in (mine, theirs):
                    if shared < len(side.tokens):
                        self.split(side, shared)
                saved += self.size(mine.tokens)
                self.united(mine, theirs)
                stack.append((mine, theirs))
        return saved


def merged(trie: Trie, merges: Sequence[tuple[Ints, Sequence[Ints]]]) -> Trie:
    """A copy of `trie` after `merges`, one after the other: each the keys to a fork, and the ways from there.

    Raises ValueError where no example goes so.
    """
    made, merger = trie.copy(), Merger()
    for keys, ways in merges:
        path = merger.locate(made.top, keys)
        if not path or merger.merge(path[-1], ways) is None:
            raise ValueError("no example of the tree goes on so")
    order = [made.top]
    for node in order:
        for child in node.children.values():
            child.start = node.start + len(node.tokens)
            order.append(child)
    return made
