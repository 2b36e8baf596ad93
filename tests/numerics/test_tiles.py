"""Tiles of rows against whole tensors: outputs and every gradient in float64, at row counts that no tile divides."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from configs.schema import AdapterConfig, Config, MemoryConfig, TrainConfig
from prefix_train import anatomy, blame, dropout, frozen, fused, gradients, model, products, step, tiles
from prefix_train.dist import Ranks
from tests import batches, models

ALONE = Ranks(0, 1, torch.device("cpu"), None)
COUNT = 7
TILED = (tiles.Tiled, fused.Norm, frozen.Adapted, frozen.FeedForward)
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


pytestmark = pytest.mark.usefixtures("small_blocks")


def options(trainable: Any, tile_rows: int, targets: list[str] = LINEAR, drop: float = 0.3) -> Config:
    return Config(
        train=TrainConfig(trainable=trainable),
        adapter=AdapterConfig(rank=2, dropout=drop, targets=targets),
        memory=MemoryConfig(tile_rows=tile_rows),
    )


def trainer_of(base: nn.Module, config: Config, images: bool) -> step.Stepper:
    prepared = model.prepare(base, config)  # type: ignore[arg-type]
    root = model.Root(prepared, torch.float64, chunk_rows=3, images=images)
    parameters = anatomy.trainable(prepared)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    optimizer = torch.optim.SGD(parameters.values(), lr=0.0)
    vision = frozenset(name for name in parameters if ".visual." in name)
    coverage = gradients.Coverage(list(parameters), vision, warmup=3)
    return step.Stepper(root, parameters, optimizer, ALONE, coverage, seed=5, clip_norm=0.0)


def run(trainer: step.Stepper, packs: list[Any]) -> tuple[float, dict[str, Tensor]]:
    result = step.update(trainer, 0, 0.0, packs)
    return result.loss, {name: one.grad.clone() for name, one in trainer.parameters.items() if one.grad is not None}


def built(family: str) -> nn.Module:
    torch.set_default_dtype(torch.float32)
    try:
        return models.build(family, torch.float64)
    finally:
        torch.set_default_dtype(torch.float64)


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm().clamp_min(1e-9)) for name in ours)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("trainable", ["adapter", "all"])
@pytest.mark.parametrize(
    "family", ["qwen3_5", "qwen3_5_moe_text", "llama", "olmo2", "olmo_hybrid", "qwen3_vl", "mixtral"]
)
def test_tiles_change_no_gradient(family: str, trainable: str) -> None:
    base = built(family)
    images = family in models.WITH_VISION
    packs = batches.batches(batches.make(base, COUNT, images=images), [[0, 1, 2], [3, 4, 5, 6]])
    targets = LINEAR[:4] if family in ("qwen3_5_moe_text", "mixtral") else LINEAR
    found = []
    for rows in (0, 8):
        trainer = trainer_of(copy.deepcopy(base), options(trainable, rows, targets), images)
        count = len([1 for module in trainer.root.modules() if isinstance(module.forward, TILED)])
        assert bool(count) == bool(rows)
        found.append(run(trainer, packs))
    assert packs[0].positions % 8
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-12)
    assert worst(found[1][1], found[0][1]) < 1e-10


@pytest.mark.usefixtures("wide")
def test_masks_of_tiles_are_those_of_the_whole() -> None:
    whole = dropout.SeededDropout(0.5, "here")
    whole.draw = "1/2/3"
    inputs = torch.ones(1, 22, 3)
    parts = []
    for start in range(0, 22, 8):
        whole.first_row = start
        parts.append(whole(inputs[:, start : start + 8]))
    whole.first_row = 0
    assert torch.equal(torch.cat(parts, 1), whole(inputs))
    whole.first_row = 3
    with pytest.raises(ValueError, match="do not begin a block"):
        whole(inputs)


@pytest.mark.usefixtures("wide")
def test_a_draw_belongs_to_its_forward() -> None:
    """Backward of a pack draws its own masks, whatever ran in between."""
    base = built("llama")
    first, second = batches.batches(batches.make(base, COUNT), [[0, 1, 2], [3, 4, 5, 6]])
    found = []
    for together in (False, True):
        trainer = trainer_of(copy.deepcopy(base), options("adapter", 8), False)
        losses = []
        for batch, draw in ((first, "a"), (second, "b")):
            losses.append(trainer.root(batch, draw=draw).loss)
            if not together:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        found.append({name: one.grad for name, one in trainer.parameters.items() if one.grad is not None})
    assert worst(found[1], found[0]) < 1e-12


@pytest.mark.usefixtures("wide")
def test_products_that_nothing_reads_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "knows", lambda _: False)  # of frozen ones see test_frozen
    base = built("llama")
    packs = batches.batches(batches.make(base, COUNT), [[0, 1, 2, 3, 4, 5, 6]])
    trainer = trainer_of(base, options("adapter", 8), False)
    block: Any = trainer.root.anatomy.layers[0].mlp
    rows = {"gate": 0, "down": 0}
    for name, last in (("gate", block.gate_proj.base_layer), ("down", block.down_proj.base_layer)):
        inner = last.forward._inner if isinstance(last.forward, tiles._Last) else last.forward

        def counted(inputs: Tensor, inner: Any = inner, name: str = name) -> Tensor:
            rows[name] += len(inputs)
            return inner(inputs)

        if isinstance(last.forward, tiles._Last):
            last.forward._inner = counted
        else:
            last.forward = counted
    step.update(trainer, 0, 0.0, packs)
    positions = packs[0].positions
    assert rows == {"gate": 2 * positions, "down": positions}  # forward, and gate's again for its tile's backward


@pytest.mark.usefixtures("wide")
def test_an_output_that_is_read_after_all_fails_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    base = built("llama")
    packs = batches.batches(batches.make(base, COUNT), [[0, 1, 2, 3, 4, 5, 6]])
    trainer = trainer_of(base, options("adapter", 8), False)
    for layer in trainer.root.anatomy.layers:
        forward = layer.mlp.forward
        layer.mlp.forward = lambda hidden, forward=forward: forward(hidden).tanh()
    with pytest.raises(blame.NotFinite):
        step.update(trainer, 0, 0.0, packs)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("trainable", ["adapter", "all"])
def test_a_norm_behind_the_feed_forward_reads_its_output(trainable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of OLMo's layers; with what other families may leave out the update fails."""
    monkeypatch.setattr(tiles, "READER", "nothing")
    base = built("olmo2")
    packs = batches.batches(batches.make(base, COUNT), [[0, 1, 2, 3, 4, 5, 6]])
    with pytest.raises(blame.NotFinite):
        step.update(trainer_of(base, options(trainable, 8), False), 0, 0.0, packs)


def test_tiles_need_recomputation_and_whole_blocks() -> None:
    base = models.build("llama", torch.float32)
    config = Config(memory=MemoryConfig(recompute=False))
    prepared = model.prepare(base, config)
    assert not any(isinstance(module.forward, TILED) for module in prepared.modules())
    with pytest.raises(ValueError, match="not recomputed"):
        tiles.install(anatomy.find(prepared), 8)
    with pytest.raises(ValueError, match="no multiple"):
        tiles.install(anatomy.find(prepared), 6)
