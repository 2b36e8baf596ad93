"""Trainers whose layers keep their middles, packs and adapters for them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from prefix_train.collate import Batch
from tests import batches, models
from tests.offloading import ForgetfulCopier, Trained, trained

COUNT = 7
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TILE = 8


def some_packs(base: PreTrainedModel, images: bool = False) -> list[Batch]:
    """Three, the largest first: of depth 3, 2 and 1, some no multiple of a tile."""
    made = batches.batches(batches.make(base, COUNT, images=images), [[0, 6, 2, 1], [3, 5], [4]])
    assert [depth(pack) for pack in made] == [3, 2, 1]
    assert any(pack.positions % TILE for pack in made)
    return made


def depth(pack: Batch) -> int:
    """Segments on the longest way from a root."""
    depths: list[int] = []
    for parent in pack.layout.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths)


def run(base: PreTrainedModel, packs: Sequence[Batch], middle: str, offloaded: str = "none", **given: Any) -> Trained:
    made = {"copier": ForgetfulCopier(), "tile_rows": TILE} | given
    return trained(copy.deepcopy(base), packs, offloaded, middle=middle, **made)


def learned(family: str) -> dict[str, Any]:
    """Adapters on the products of both halves, with dropout."""
    more = () if family in models.WITHOUT_GATE or "moe" in family else ("gate_proj", "down_proj")
    recurrent = {"qwen3_5_text": ("in_proj_qkv", "out_proj"), "qwen3_5": ("out_proj",), "qwen3_next": ("out_proj",)}
    return {"rank": 2, "dropout": 0.3, "targets": [*ATTENTION, *recurrent.get(family, ()), *more]}
