"""Attention that is computed once: the same gradients, to the bit, wherever its output waits."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from configs import compose
from configs.errors import UserError
from prefix_train import attention, budget, offload, shelf
from prefix_train.collate import Batch
from tests import batches, models
from tests.offloading import (
    CHUNK,
    ForgetfulCopier,
    Trained,
    backward,
    fifty_updates,
    same,
    trained,
)

COUNT = 7


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "PINNED_CHUNK", CHUNK)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the packs that attention was computed over."""
    calls: list[int] = []
    merged = attention._merged

    def counted(query: Any, *args: Any) -> Any:
        calls.append(query.shape[2])
        return merged(query, *args)

    monkeypatch.setattr(attention, "_merged", counted)
    return calls


def some_packs(base: PreTrainedModel) -> list[Batch]:
    return batches.batches(batches.make(base, COUNT), [[0, 1, 2, 3], [4], [5, 6]])


def run(base: PreTrainedModel, packs: list[Batch], offloaded: str, keep: str, **given: Any) -> Trained:
    return trained(copy.deepcopy(base), packs, offloaded, copier=ForgetfulCopier(), keep=keep, **given)


@pytest.mark.parametrize("keep", ["auto", "1", "3"])
@pytest.mark.parametrize("offloaded", ["none", "auto", "1"])
@pytest.mark.parametrize("family", ["llama", "olmo_hybrid", "qwen3_5_text"])
def test_the_same_gradients_to_the_bit(family: str, offloaded: str, keep: str, computed: list[int]) -> None:
    base = models.build(family)
    packs = some_packs(base)
    right = backward(run(base, packs, "none", "none", rank=2, dropout=0.3), packs)
    layers = [layer for layer in base.model.layers if hasattr(layer, "self_attn")]
    positions = sum(pack.positions for pack in packs)
    assert sum(computed) == 2 * len(layers) * positions
    computed.clear()
    kept = len(layers) if keep == "auto" else min(int(keep), len(layers))
    made = run(base, packs, offloaded, keep, rank=2, dropout=0.3)
    assert same(backward(made, packs), right)
    assert sum(computed) == (2 * len(layers) - kept) * positions
    if made.offload is not None:
        assert made.offload.pool.used == 0


@pytest.mark.parametrize("offloaded", ["none", "auto"])
def test_in_layers_of_two_halves(offloaded: str, computed: list[int]) -> None:
    """Only the half with the attention is given what it left."""
    base = models.build("qwen3_5_text")
    packs = some_packs(base)
    given = {"rank": 2, "dropout": 0.3, "targets": ["q_proj", "o_proj", "in_proj_qkv", "gate_proj"]}
    right = backward(run(base, packs, "none", "none", **given), packs)
    computed.clear()
    assert same(backward(run(base, packs, offloaded, "auto", middle="auto", **given), packs), right)
    assert sum(computed) == sum(pack.positions for pack in packs)


def test_in_fifty_updates() -> None:
    base = models.build("qwen3_5_text")
    plain, kept = (fifty_updates(base, "none"), fifty_kept(base))
    pairs = list(zip(plain, kept, strict=True))
    assert all(same(mine, theirs) for theirs, mine in pairs)
    assert not same(pairs[0][0], pairs[-1][0])


def fifty_kept(base: Any) -> Any:
    return fifty_updates(base, "auto", copier=ForgetfulCopier(), keep="auto")


def given_away(made: offload.Offload, waiting: Any) -> shelf.Waiting:
    """The fault: its chunks are free while it waits there."""
    made.pool.give(waiting.__self__._chunks)
    return waiting  # type: ignore[no-any-return]


def not_waited_for(made: offload.Offload, waiting: Any) -> shelf.Waiting:
    """The fault: it is read while it comes back."""
    stored = waiting.__self__

    def taken() -> Any:
        stored.fetch()
        return stored._on_its_way[0]

    return taken


@pytest.mark.parametrize("fault", [given_away, not_waited_for])
def test_waiting_too_little_shows(
    fault: Callable[[offload.Offload, Any], shelf.Waiting], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = models.build("llama")
    packs = some_packs(base)
    right = backward(run(base, packs, "none", "none"), packs)
    wait = offload.Offload.wait
    monkeypatch.setattr(offload.Offload, "wait", lambda self, source: fault(self, wait(self, source)))
    assert not same(backward(run(base, packs, "auto", "auto"), packs), right)


def test_a_graph_that_is_kept_and_one_that_is_dropped() -> None:
    base = models.build("llama")
    packs = some_packs(base)[:1]
    once = backward(run(base, packs, "none", "none"), packs)
    for offloaded in ("none", "auto"):
        made = run(base, packs, offloaded, "auto")
        loss = made.stepper.root(packs[0], draw="0").loss
        loss.backward(retain_graph=True)
        loss.backward()
        twice = {name: one.grad for name, one in made.stepper.parameters.items()}
        assert all(torch.equal(twice[name], 2 * once[name]) for name in once)  # type: ignore[arg-type]
        del loss
        made.stepper.root(packs[0], draw="0")
        gc.collect()
        if made.offload is not None:
            assert made.offload.pool.used == 0


def test_the_pool_holds_it_and_no_more() -> None:
    base = models.build("llama")
    packs = some_packs(base)[:1]
    made = run(base, packs, "auto", "auto")
    assert made.offload is not None
    backward(made, packs)
    assert made.offload.pool.peak == made.offload.pool.size > run(base, packs, "auto", "none").offload.pool.size  # type: ignore[union-attr]


def test_nothing_is_kept_without_gradients() -> None:
    base = models.build("llama")
    packs = some_packs(base)[:1]
    made = run(base, packs, "auto", "auto")
    with torch.no_grad():
        made.stepper.root(packs[0], draw="0")
    assert made.offload is not None
    assert made.offload.pool.peak == 0
    assert shelf.current() is None


def test_mistakes_are_named() -> None:
    for overrides, wrong in (
        (["memory.keep_attention=some"], "give auto, none or a number"),
        (["memory.keep_attention=auto", "memory.recompute=false"], "everything is kept"),
    ):
        with pytest.raises(UserError, match=wrong):
            compose.load(Path(__file__).parents[1] / "data" / "tiny-geometry.yaml", overrides)
