"""The forest of shared beginnings against brute force on small alphabets, and its speed on long prefixes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_train.tree import Forest, build_forest

Sequences = list[tuple[int, ...]]
examples = st.lists(st.lists(st.integers(-2, 1), min_size=1, max_size=9).map(tuple), min_size=1, max_size=12)


def forest_of(sequences: Sequences, min_shared: int) -> Forest:
    return build_forest((np.array(sequence, np.int64) for sequence in sequences), min_shared)


def spelled(forest: Forest, sequences: Sequences, node: int) -> tuple[int, ...]:
    """The tokens of one node, read from its source."""
    start = int(forest.start[node])
    return sequences[int(forest.source[node])][start : start + int(forest.length[node])]


def ends_of_paths(forest: Forest) -> list[tuple[int, ...]]:
    return [tuple(int(forest.end[node]) for node in forest.path(example)) for example in range(len(forest))]


def brute_force(sequences: Sequences, min_shared: int) -> list[tuple[int, ...]]:
    """Where each example's path is cut, found recursively by grouping whole tuples."""

    def branches(group: list[int], begin: int) -> list[dict[int, tuple[int, ...]]]:
        """One entry per branch: example -> cuts from here to its end."""
        found = []
        for first in dict.fromkeys(sequences[i][begin] for i in group):
            same = [i for i in group if sequences[i][begin] == first]
            end = begin + 1
            while all(len(sequences[i]) > end for i in same) and len({sequences[i][end] for i in same}) == 1:
                end += 1
            here = {i: (end,) for i in same if len(sequences[i]) == end}
            below = branches([i for i in same if len(sequences[i]) > end], end)
            if not below or (end - begin) * (len(below) + bool(here) - 1) >= min_shared:
                found.append(here | {i: (end, *cuts) for branch in below for i, cuts in branch.items()})
            else:
                found += ([here] if here else []) + below
        return found

    cuts: dict[int, tuple[int, ...]] = {}
    for branch in branches(list(range(len(sequences))), 0):
        cuts |= branch
    return [cuts[i] for i in range(len(sequences))]


@given(examples, st.integers(0, 12))
def test_paths_equal_brute_force(sequences: Sequences, min_shared: int) -> None:
    assert ends_of_paths(forest_of(sequences, min_shared)) == brute_force(sequences, min_shared)


@given(examples, st.integers(0, 12))
def test_every_path_spells_its_example(sequences: Sequences, min_shared: int) -> None:
    forest = forest_of(sequences, min_shared)
    for example, sequence in enumerate(sequences):
        assert sum((spelled(forest, sequences, node) for node in forest.path(example)), ()) == sequence
    assert forest.lengths.tolist() == [len(sequence) for sequence in sequences]


@given(examples)
def test_without_a_threshold_every_distinct_beginning_is_stored_once(sequences: Sequences) -> None:
    distinct = {sequence[:end] for sequence in sequences for end in range(1, len(sequence) + 1)}
    assert int(forest_of(sequences, 1).length.sum()) == len(distinct)


@given(examples, st.integers(1, 12))
def test_every_shared_node_saves_enough(sequences: Sequences, min_shared: int) -> None:
    forest = forest_of(sequences, min_shared)
    children = np.bincount(forest.parent + 1, minlength=len(forest.parent) + 1)[1:]
    ended = np.isin(np.arange(len(forest.parent)), forest.last)
    shared = children > 0
    assert (forest.length * (children + ended - 1) >= min_shared)[shared].all()


@given(examples, st.randoms())
def test_sharing_does_not_depend_on_the_order_of_examples(sequences: Sequences, random: object) -> None:
    order = list(range(len(sequences)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = ends_of_paths(forest_of([sequences[i] for i in order], 3))
    assert shuffled == [ends_of_paths(forest_of(sequences, 3))[i] for i in order]


def test_equal_examples_share_one_path() -> None:
    forest = forest_of([(1, 2, 3), (1, 2, 4), (1, 2, 3)], 2)
    assert forest.path(0) == forest.path(2)
    assert forest.path(0) != forest.path(1)


def test_an_example_that_another_continues_ends_at_a_node() -> None:
    shared = (5,) * 20
    forest = forest_of([shared, (*shared, 1, 2), shared], 16)
    assert ends_of_paths(forest) == [(20,), (20, 22), (20,)]
    assert forest.path(1)[0] == forest.path(0)[0]


def test_an_example_that_another_continues_too_little_gets_its_own_tokens() -> None:
    assert ends_of_paths(forest_of([(1, 2), (1, 2, 3)], 16)) == [(2,), (3,)]


def test_images_are_shared_only_where_their_keys_are_equal() -> None:
    text, one, other = (7,) * 30, (-11,) * 30, (-12,) * 30
    forest = forest_of([(*text, *one, 1), (*text, *one, 2), (*text, *other, 1)], 16)
    assert ends_of_paths(forest) == [(30, 60, 61), (30, 60, 61), (30, 61)]


def test_keys_of_a_whole_int64_are_told_apart() -> None:
    low, high = -(2**62) - 1, -(2**62)
    assert ends_of_paths(forest_of([(low, 1), (high, 1), (low, 2)], 1)) == [(1, 2), (2,), (1, 2)]


def test_long_differences_are_found_at_every_block_border() -> None:
    base = np.zeros(5000, np.int64)
    for at in (0, 1, 63, 64, 65, 575, 576, 577, 4671, 4672, 4673, 4999):
        other = base.copy()
        other[at] = 1
        assert [cuts[0] for cuts in ends_of_paths(build_forest([base, other], 1))] == [at or 5000] * 2


@pytest.mark.parametrize("keys", [np.empty(0, np.int64), np.zeros((2, 2), np.int64)])
def test_an_example_without_tokens_is_refused(keys: np.ndarray) -> None:
    with pytest.raises(ValueError, match="example 1 has keys of shape"):
        build_forest([np.ones(3, np.int64), keys], 1)


@pytest.mark.parametrize(
    ("table", "value", "says"),
    [
        ("parent", [0, 0, 0], "before their children"),
        ("parent", [-1, 2, 0], "before their children"),
        ("length", [2, 0, 1], "at least 1"),
        ("start", [0, 1, 2], "where their parents end"),
        ("last", [1, 3], "not there"),
        ("source", [0, 0, 2], "not there"),
        ("length", [2, 1], "different lengths"),
    ],
)
def test_tables_that_describe_no_forest_are_refused(table: str, value: list[int], says: str) -> None:
    good = forest_of([(1, 2, 3), (1, 2, 4)], 1)
    tables = {name: getattr(good, name) for name in ("parent", "start", "length", "source", "last")}
    Forest(**tables)
    with pytest.raises(ValueError, match=says):
        Forest(**tables | {table: np.array(value)})


def test_deep_chains_need_no_recursion() -> None:
    turns = [np.arange(1, n + 1, dtype=np.int64) for n in range(1, 1500)]
    forest = build_forest(turns, 1)
    assert len(forest.path(1498)) == 1499


def test_long_shared_prefixes_are_read_once_each_and_not_kept() -> None:
    prefix = np.arange(64_000, dtype=np.int64)

    def rows(count: int) -> Iterator[np.ndarray]:
        for row in range(count):
            yield np.concatenate([prefix, np.full(40, row)])

    rows_before = list(rows(4))
    assert len(build_forest(rows_before, 16).parent) == 5
    begin = time.process_time()
    forest = build_forest(rows(2_000), 16)
    assert time.process_time() - begin < 5
    assert forest.length.tolist() == [64_000] + [40] * 2_000
