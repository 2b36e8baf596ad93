"""A pack equals its examples whatever its forest: depths, lengths around every boundary, images anywhere, update after
update."""

from __future__ import annotations

import random

import pytest
import torch

from tests import forests, models, oracle

LENGTHS = (1, 2, 3, 4, 63, 64, 65, 130)
EXACT = {"hidden": 1e-10, "gradient": 1e-10}

SHAPES = {
    "one segment": ([70], [-1]),
    "one token": ([1, 1], [-1, 0]),
    "history over many short ancestors": ([1, 1, 1, 1, 1, 2, 3, 5], [-1, 0, 1, 2, 3, 4, 5, 5]),
    "many children": ([66, *[2] * 40], [-1, *[0] * 40]),
    "many roots": ([3] * 12, [-1] * 12),
    "children longer than their parent": ([2, 129, 65, 1], [-1, 0, 0, 0]),
    "a chunk exactly, and again": ([64, 64, 64, 64], [-1, 0, 0, 2]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str) -> None:
    model = models.build("qwen3_5_text", torch.float64)
    model.activation_checkpointing_enable({"use_reentrant": False})
    pack = forests.build(model, *SHAPES[shape])
    with oracle.float64():
        forests.assert_same(forests.run(model, pack), oracle.run(model, pack.examples), **EXACT)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "llama"])
def test_random_forests(family: str, depth: int) -> None:
    model = models.build(family, torch.float64)
    model.activation_checkpointing_enable({"use_reentrant": False})
    for seed in range(2):
        lengths, parents = forests.random_tree(10 * depth + seed, depth, LENGTHS, roots=1 + seed, widest=2)
        assert max(forests.depths(parents)) == depth - 1
        draw = random.Random(seed)
        images = [index for index in range(len(lengths)) if family == "qwen3_5" and draw.random() < 0.4]
        pack = forests.build(model, lengths, parents, seed=seed, images=images)
        with oracle.float64():
            forests.assert_same(forests.run(model, pack), oracle.run(model, pack.examples, models.IMAGE), **EXACT)


def test_twenty_updates() -> None:
    """Two models that start equal, one trained on packs, one on the examples alone, stay equal."""
    packs, alone = (models.build("qwen3_5", torch.float64) for _ in range(2))
    packs.activation_checkpointing_enable({"use_reentrant": False})
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9) for model in (packs, alone)]
    with oracle.float64():
        for update in range(20):
            lengths, parents = forests.random_tree(update, 3, (1, 2, 5, 17), roots=1 + update % 2, widest=2)
            pack = forests.build(packs, lengths, parents, seed=update, images=[update % len(lengths)])
            mine, theirs = forests.run(packs, pack), oracle.run(alone, pack.examples, models.IMAGE)
            forests.assert_same(mine, theirs, **EXACT)
            for model, result, optimizer in zip((packs, alone), (mine, theirs), optimizers, strict=True):
                for name, parameter in model.named_parameters():
                    parameter.grad = result.gradients.get(name)
                optimizer.step()
    moved = models.build("qwen3_5", torch.float64).state_dict()
    assert all(not torch.equal(value, moved[name]) for name, value in packs.state_dict().items())
