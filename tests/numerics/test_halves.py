"""The two halves of a decoder layer: each family's own forward to the bit, and nothing computed that nothing reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from configs.errors import UserError
from configs.schema import Config, MemoryConfig
from prefix_train import blame, families, halves, model, products, step
from tests import models
from tests.middles import TILE, learned, run, some_packs
from tests.numerics.test_frozen import Products
from tests.offloading import backward, same

pytestmark = pytest.mark.usefixtures("small_blocks")


CASES = [
    *((family, TILE, True) for family in models.FAMILIES),
    *((family, rows, rows == 0) for family in ("olmo_hybrid", "qwen3_5", "qwen3_next") for rows in (0, TILE)),
]
"""Family, rows of a tile, and whether adapters are trained or everything."""


@pytest.mark.parametrize(("family", "tile_rows", "adapted"), CASES)
def test_every_family_is_what_its_own_forward_is(family: str, tile_rows: int, adapted: bool) -> None:
    base = models.build(family)
    packs = some_packs(base, images=family in models.WITH_VISION)
    given = {"tile_rows": tile_rows, **(learned(family) if adapted else {})}
    right = backward(run(base, packs, "none", **given), packs)
    assert same(backward(run(base, packs, "auto", **given), packs), right)
    assert all(one.isfinite().all() for one in right.values())
    assert any(one.any() for one in right.values())


def without(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The fault: a half without one of its norms."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        init = halves.Half.__init__

        def planted(self: halves.Half, *given: Any) -> None:
            init(self, *given)
            setattr(self, name, torch.nn.Identity())

        patch.setattr(halves.Half, "__init__", planted)

    return plant


def without_sum(patch: pytest.MonkeyPatch) -> None:
    """The fault: what the middle was is not added again."""
    patch.setattr(halves.FeedForwardHalf, "_sum", lambda self, hidden, made: made)


@pytest.mark.parametrize(
    ("family", "plant"), [("llama", without("before")), ("olmo2", without("behind")), ("llama", without_sum)]
)
def test_other_halves_show(
    family: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = models.build(family)
    packs = some_packs(base)
    right = backward(run(base, packs, "none", **learned(family)), packs)
    plant(monkeypatch)
    assert not same(backward(run(base, packs, "auto", **learned(family)), packs), right)


def test_every_layer_that_is_understood_is_known() -> None:
    assert set(families.HALVES) == {layer for family in families.FAMILIES.values() for layer in family.layers}


# What is not computed, and what is not alive.


def last_weight(layer: Any) -> Tensor:
    """Of the last linear module of a layer's mixer."""
    last = layer.self_attn.o_proj if hasattr(layer, "self_attn") else layer.linear_attn.out_proj
    found: Tensor = getattr(last, "base_layer", last).weight
    return found


@pytest.mark.parametrize("known", [True, False], ids=["frozen", "tiled"])
@pytest.mark.parametrize(
    "targets", [["o_proj", "out_proj"], ["q_proj", "in_proj_qkv"], None], ids=["adapted", "plain", "all"]
)
def test_a_mixer_s_last_product_is_computed_once(
    targets: list[str] | None, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = models.build("qwen3_5_text")
    packs = some_packs(base)[:1]
    given = {"rank": 2, "dropout": 0.3, "targets": targets} if targets else {}
    if not known:
        monkeypatch.setattr(products, "knows", lambda _: False)
    rows = packs[0].positions
    for middle, times in (("none", [2] * 4), ("auto", [1] * 4), ("2", [2, 2, 1, 1])):
        made = run(base, packs, middle, **given)
        layers = made.stepper.root.anatomy.layers
        with Products({str(index): last_weight(layer) for index, layer in enumerate(layers)}) as counted:
            backward(made, packs)
        assert [counted.rows[str(index)] for index in range(4)] == [rows * one for one in times]


def test_a_first_mixer_through_which_no_gradient_passes_is_not_computed_again() -> None:
    base = models.build("llama")
    packs = some_packs(base)[:1]
    for middle, times in (("none", [2, 2]), ("auto", [1, 2])):
        made = run(base, packs, middle, "auto", rank=2, targets=["gate_proj"])
        layers = made.stepper.root.anatomy.layers
        with Products({str(index): layer.self_attn.k_proj.weight for index, layer in enumerate(layers)}) as counted:
            backward(made, packs)
        assert [counted.rows[str(index)] for index in range(2)] == [packs[0].positions * one for one in times]


@pytest.mark.parametrize("targets", [["o_proj", "gate_proj"], ["gate_proj"], None], ids=["adapted", "plain", "all"])
@pytest.mark.parametrize("known", [True, False], ids=["frozen", "tiled"])
def test_a_product_that_is_read_after_all_fails_the_update(
    targets: list[str] | None, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        monkeypatch.setattr(products, "knows", lambda _: False)
    base = models.build("llama")
    packs = some_packs(base)[:1]
    given = {"rank": 2, "dropout": 0.3, "targets": targets} if targets else {}
    made = run(base, packs, "auto", **given)
    for layer in made.stepper.root.anatomy.layers:
        forward = layer.self_attn.o_proj.forward
        layer.self_attn.o_proj.forward = lambda hidden, forward=forward: forward(hidden).tanh()
    if targets and "o_proj" in targets:
        with pytest.raises(blame.NotFinite):
            step.update(made.stepper, 0, 0.0, packs)
    else:  # nothing stands in: the product was computed since something reads it
        step.update(made.stepper, 0, 0.0, packs)


@pytest.mark.parametrize("known", [True, False], ids=["frozen", "tiled"])
def test_a_norm_behind_the_mixer_reads_its_product(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of OLMo's layers; with what other families may leave out the update fails."""
    if not known:
        monkeypatch.setattr(products, "knows", lambda _: False)
    monkeypatch.setattr(halves.MixerHalf, "unread", property(lambda self: self.module.o_proj))
    base = models.build("olmo2")
    packs = some_packs(base)[:1]
    made = run(base, packs, "auto", **learned("olmo2"))
    with pytest.raises(blame.NotFinite):
        step.update(made.stepper, 0, 0.0, packs)


# What is refused.


class Louder(LlamaDecoderLayer):
    """A layer of somebody else's, derived from one that is known."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


def test_layers_that_are_not_known_are_named() -> None:
    base = models.build("llama")
    config = Config(memory=MemoryConfig(keep_middle="1"))
    base.model.layers[0].__class__ = Louder
    model.prepare(copy.deepcopy(base), config)  # keeps its input alone
    base.model.layers[1].__class__ = Louder
    with pytest.raises(UserError, match=r"memory\.keep_middle: Louder is not known to be two residual sums"):
        model.prepare(copy.deepcopy(base), config)
    base = models.build("llama")
    layer = base.model.layers[1]
    layer.forward = partial(type(layer).forward, layer)
    with pytest.raises(UserError, match=r"memory\.keep_middle: LlamaDecoderLayer is not known"):
        model.prepare(base, config)


def test_layers_that_are_not_recomputed_keep_no_middle() -> None:
    config = Config(memory=MemoryConfig(recompute=False, keep_middle="auto"))
    with pytest.raises(ValueError, match="not recomputed"):
        model.prepare(models.build("llama"), config)
