"""What examples share: counted against the examples themselves, and sizes against plans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import PackConfig
from prefix_train import sharing
from prefix_train.plan import plan_epoch
from prefix_train.tree import Forest, build_forest

RULES, OTHER = tuple(range(1000, 1100)), tuple(range(2000, 2040))
SEQUENCES = [(*RULES, 1, 2, 3), (*RULES, 4), (*RULES, 4), (*OTHER, 5), (*OTHER, 6, 7), (9, 9)]


def forest_of(sequences: list[tuple[int, ...]], min_shared: int = 1) -> Forest:
    return build_forest([np.array(sequence, np.int64) for sequence in sequences], min_shared)


def test_beginnings_are_those_that_save_most_first() -> None:
    first, second, third = sharing.beginnings(forest_of(SEQUENCES))
    assert (first.start, first.tokens, first.examples, first.saves, first.first) == (0, 100, 3, 200, 0)
    assert (second.start, second.tokens, second.examples, second.saves, second.first) == (0, 40, 2, 40, 3)
    assert (third.start, third.tokens, third.examples, third.saves) == (100, 1, 2, 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple), min_size=1, max_size=9))
def test_the_shared_part_is_what_a_comparison_of_all_finds(sequences: list[tuple[int, ...]]) -> None:
    """A token is shared if some other example has the same tokens up to it."""
    shared = 0
    for place, sequence in enumerate(sequences):
        others = [*sequences[:place], *sequences[place + 1 :]]
        shared += sum(any(other[: n + 1] == sequence[: n + 1] for other in others) for n in range(len(sequence)))
    total = sum(map(len, sequences))
    forest = forest_of(sequences)
    assert sharing.shared_part(forest) == pytest.approx(shared / total)
    assert sum(one.saves for one in sharing.beginnings(forest)) == total - int(forest.length.sum())


def test_sizes_are_bounds_that_plans_keep() -> None:
    rng = np.random.default_rng(0)
    sequences = [(*RULES, *rng.integers(1, 900, rng.integers(5, 60)).tolist()) for _ in range(60)]
    forest = forest_of(sequences, 16)
    found = sharing.sizes(forest, 16, 512)
    assert [size.max_positions for size in found] == [256, 512, 1024, 2048]
    for size in found:
        pack = PackConfig(max_positions=size.max_positions, packs_per_update=1)
        packs = list(plan_epoch(forest.lengths, forest, pack, 1, seed=0, epoch=0).packs)
        assert size.packs <= len(packs)
        assert size.positions <= sum(pack.positions for pack in packs) <= 1.05 * size.positions
    assert [size.positions for size in found] == sorted((size.positions for size in found), reverse=True)
    assert sharing.sizes(forest, 16, 64)[0].max_positions >= int(forest.lengths.max())


def test_what_is_said_names_text_and_line() -> None:
    forest = forest_of(SEQUENCES)
    found = sharing.summary(
        forest, [f"d:{n + 1}" for n in range(6)], lambda example, start, count: f"{example} {start}"
    )
    assert found["part"] == pytest.approx((300 + 80 + 2) / sum(map(len, SEQUENCES)))
    (_, words), (_, first), (_, second), _ = sharing.describe(found)
    assert words.startswith("97.9% of the examples' tokens are in 3 beginnings")
    assert first == "100 tokens x 3 examples, '0 0' (d:1)"
    assert second == "40 tokens x 2 examples, '3 0' (d:4)"
    assert sharing.describe(sharing.summary(forest_of([(1,), (2,)]), ["a", "b"], lambda *_: ""))[0][1].startswith(
        "noth"
    )
