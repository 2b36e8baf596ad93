"""Layers that are recomputed in two halves: the same gradients, to the bit, wherever their middles wait."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from transformers import PreTrainedModel

from prefix_train import budget, dropout
from prefix_train.collate import Batch
from tests import batches, models
from tests.offloading import (
    CHUNK,
    ForgetfulCopier,
    Trained,
    backward,
    same,
    trained,
)

COUNT = 7
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "PINNED_CHUNK", CHUNK)
    monkeypatch.setattr(dropout, "BLOCK", 4)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is given back is given back when the last reference goes, not when somebody collects cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def some_packs(base: PreTrainedModel, images: bool = False) -> list[Batch]:
    """Depths 1 to 3, of three sizes, no tile divides them."""
    return batches.batches(batches.make(base, COUNT, images=images), [[0, 1, 2, 3], [4], [5, 6]])


def run(base: PreTrainedModel, packs: Sequence[Batch], middle: str, offloaded: str = "none", **given: Any) -> Trained:
    made = {"copier": ForgetfulCopier(), "tile_rows": 8} | given
    return trained(copy.deepcopy(base), packs, offloaded, middle=middle, **made)


def learned(family: str) -> dict[str, Any]:
    """Adapters on the products of both halves, with dropout."""
    more = () if family in models.WITHOUT_GATE or "moe" in family else ("gate_proj", "down_proj")
    recurrent = {"qwen3_5_text": ("in_proj_qkv", "out_proj"), "qwen3_5": ("out_proj",), "qwen3_next": ("out_proj",)}
    return {"rank": 2, "dropout": 0.3, "targets": [*ATTENTION, *recurrent.get(family, ()), *more]}


# The same gradients, to the bit.


@pytest.mark.parametrize("tile_rows", [8, 0])
@pytest.mark.parametrize("adapted", [True, False], ids=["adapter", "all"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_family_is_what_its_own_forward_is(family: str, adapted: bool, tile_rows: int) -> None:
    base = models.build(family)
    images = family in models.WITH_VISION
    packs = some_packs(base, images)
    given = {"tile_rows": tile_rows, **(learned(family) if adapted else {})}
    right = backward(run(base, packs, "none", **given), packs)
    assert same(backward(run(base, packs, "auto", **given), packs), right)
    assert all(one.isfinite().all() for one in right.values())
    assert any(one.any() for one in right.values())


@pytest.mark.parametrize("keep", ["none", "auto"])
@pytest.mark.parametrize("middle", ["auto", "1", "3"])
@pytest.mark.parametrize("offloaded", ["none", "auto", "1", "2"])
@pytest.mark.parametrize("family", ["llama", "olmo_hybrid", "qwen3_5_text"])
def test_wherever_middles_wait(family: str, offloaded: str, middle: str, keep: str) -> None:
    base = models.build(family)
    packs = some_packs(base)
    right = backward(run(base, packs, "none", **learned(family)), packs)
    made = run(base, packs, middle, offloaded, keep=keep, **learned(family))
    assert same(backward(made, packs), right)
    if made.offload is not None:
        assert made.offload.pool.used == 0
        assert made.offload.pool.peak == made.offload.pool.size
