"""Which fused kernels run where."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from configs.errors import UserError
from configs.schema import Config, TrainConfig
from prefix_train import anatomy, frozen, fused, model, residual, unit
from tests import models


@pytest.mark.parametrize("family", models.FAMILIES)
def test_one_kernel_for_sums_and_norms_is_refused_where_a_layer_is_not_known(family: str) -> None:
    base = models.build(family, torch.float32)
    layers = anatomy.find(model.prepare(base, models_config())).layers
    if family.startswith("olmo"):
        with pytest.raises(UserError, match="does not compute what Olmo"):
            [residual.install(layer, "fused") for layer in layers]
    else:
        assert all(isinstance(unit._forward_of(layer)._inner, residual.Layer) for layer in layers)


def test_every_norm_and_activation_of_the_families_is_known() -> None:
    for family in (name for name in models.FAMILIES if not name.startswith("olmo")):
        prepared = model.prepare(models.build(family, torch.float32), models_config())
        norms = [one.forward for one in prepared.modules() if isinstance(one.forward, fused.Norm)]
        own = [
            one for layer in anatomy.find(prepared).layers for one in layer.modules() if "Norm" in type(one).__name__
        ]
        assert len(norms) == len(own) > 0
        blocks = [one.forward for one in prepared.modules() if isinstance(one.forward, frozen.FeedForward)]
        assert all(isinstance(one.otherwise._inner, fused.FeedForward) for one in blocks)  # type: ignore[attr-defined]
        dense = sum(hasattr(layer.mlp, "gate_proj") for layer in anatomy.find(prepared).layers)  # others have experts
        assert len(blocks) == dense


def models_config() -> Config:
    return Config(train=TrainConfig(trainable="all"))


def test_nothing_is_fused_that_is_not_known() -> None:
    assert not fused.knows_norm(nn.LayerNorm(4))
    assert not fused.knows_norm(nn.RMSNorm(4))
