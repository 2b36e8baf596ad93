"""Several targets for one item under several instructions: a tree of depth 3, each item once, exact in float64."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefix_train.packing import Pack
from prefix_train.tree import build_forest
from tests import chats, conversations
from tests.chats import picture, text
from tests.numerics import test_packs_against_oracle as product
from tests.numerics.test_packs_against_oracle import IN_FLOAT64, MIN_SHARED, PackConfig

ANSWERS = (("a bakery", "bread is sold", "a bakery"), ("mill lane",), ("nobody", "residents only", "no one", "7"))
"""For each item; one target stands there twice, which is to weigh twice."""


def rows_of(folder: Path, repeated: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows with targets, or one row for each, and what they stand for: one row for each, as the oracle takes them."""
    chats.draw(folder / "item.png", 32, 32, seed=3)
    given: list[dict[str, Any]] = []
    alone: list[dict[str, Any]] = []
    for instructions in (conversations.SYSTEM, conversations.OTHER):
        for number, answers in enumerate(ANSWERS):
            question = [picture("item.png")] * (number % 2) + [text(f"{number} is the sign. {conversations.EXAMPLE}")]
            each = [chats.row(question, answer, system=instructions) for answer in answers]
            alone += each
            given += each if repeated else [{"messages": each[0]["messages"][:-1], "targets": list(answers)}]
    return given, alone


def depth(pack: Pack) -> int:
    return max(map(len, pack.paths))


@pytest.mark.parametrize("repeated", [False, True], ids=["targets", "a row for each"])
def test_a_tree_of_depth_three_trains_as_each_example_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeated: bool, wide: None
) -> None:
    given, alone = rows_of(tmp_path, repeated)
    monkeypatch.setattr(conversations, "rows", lambda images, folder: alone)
    # The product reads the file as given, the oracle each example.
    made = conversations.product
    monkeypatch.setattr(conversations, "product", lambda rows, *rest: made(given, *rest))
    case = product.make(tmp_path, "qwen3_5", "both", torch.float64)
    assert len(case.examples) == len(alone) == 16
    assert len({example.source for example in case.examples}) == 16
    whole = PackConfig(max_positions=4096, min_shared=MIN_SHARED, examples_per_update=64)
    split = PackConfig(max_positions=160, min_shared=MIN_SHARED, packs_per_update=2)
    (update,) = product.planned(case, whole, 0).updates
    ((pack,),) = update
    assert depth(pack) == 3
    assert pack.parents.count(-1) == 2
    product.check(case, [whole, split], ["example", "token"], IN_FLOAT64)


def test_an_item_is_computed_once_whatever_the_number_of_its_targets(tmp_path: Path) -> None:
    given, _ = rows_of(tmp_path, repeated=False)
    _, processor = conversations.build("qwen3_5", torch.float32)
    model, _ = conversations.build("qwen3_5", torch.float32)
    examples = conversations.product(given, tmp_path, model, processor)
    forest = build_forest([example.keys for example in examples], MIN_SHARED)
    at = 0
    for answers in ANSWERS * 2:
        members = range(at, at + len(answers))
        at += len(answers)
        prompts = {example.prompt_length for example in examples[members.start : members.stop]}
        assert len(prompts) == 1
        paths = [forest.path(member) for member in members]
        # What the targets of one item share reaches through the item: only the answers are each one's own.
        for one, other in pairwise(paths):
            shared = [node for node in one if node in other]
            assert forest.end[shared[-1]] >= prompts.copy().pop()
        if len(answers) > 1:
            assert max(map(len, paths)) == 3
    twice = [forest.last[0], forest.last[2]]
    assert twice[0] == twice[1], "equal targets are one path, and weigh twice"
    assert np.array_equal(examples[0].keys, examples[2].keys)
