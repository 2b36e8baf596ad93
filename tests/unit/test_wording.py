"""Words agree with their number."""

from __future__ import annotations

import re

import numpy as np

from configs.schema import PackConfig
from configs.wording import counted
from prefix_train import sharing
from prefix_train.plan import plan_epoch
from prefix_train.plan_page import page
from prefix_train.plan_summary import describe, summary
from prefix_train.tree import build_forest


def test_one_is_singular() -> None:
    assert [counted(n, "pack") for n in (0, 1, 2, 1499)] == ["0 packs", "1 pack", "2 packs", "1,499 packs"]


def test_nothing_of_a_plan_of_one_has_a_plural() -> None:
    """One example in one pack on one rank, and one beginning of one token."""
    wrong = re.compile(r"\b1 (packs|ranks|examples|updates|segments|tokens|beginnings|times|texts|positions)\b")
    forest = build_forest([np.array([5])], 1)
    plan = plan_epoch(forest.lengths, forest, PackConfig(max_positions=8, packs_per_update=1), 1, 0, 0)
    assert not wrong.search(re.sub(r"(positions|lengths) .*", "", describe(plan)))
    assert "examples      1 in 1 pack (shared)" in describe(plan)
    assert "on 1 rank: 1 pack and 1 example per update" in describe(plan)
    assert "1 example in 1 pack: " in page.lead(summary(plan))
    two = build_forest([np.array([5, 6]), np.array([5, 7])], 1)
    told = sharing.describe(sharing.summary(two, ["a:1", "a:2"], lambda *_: "x"))
    assert [text for _, text in told if wrong.search(text)] == []
