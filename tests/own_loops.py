"""Rows for training loops that are not ours, and what training each of them alone leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefix_train.packs import Packs
from prefix_train.render import Example
from tests import batches, oracle

LR, CLIP = 1e-3, 0.5


def rows_of(examples: Sequence[Example]) -> list[dict[str, Any]]:
    """Text examples as rows of most trainers."""
    return [
        {"input_ids": example.ids.tolist(), "labels": np.where(example.target, example.ids, -100).tolist()}
        for example in examples
    ]


def adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0)


def train_alone(
    model: nn.Module, base: PreTrainedModel, examples: Sequence[Example], packs: Packs, updates: int | None = None
) -> list[float]:
    """Train `model`, which holds `base`, on each example of each update alone; the updates' losses."""
    parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = adamw(parameters.values())
    losses = []
    for members in packs.members[:updates]:
        result = oracle.run(base, batches.alone([examples[member] for member in members]))
        # `run` names gradients by the base's own names; PEFT changes modules in place, so these are the same tensors.
        of_base = dict(base.named_parameters())
        for name, gradient in result.gradients.items():
            of_base[name].grad = gradient
        nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        optimizer.step()
        losses.append(float(result.loss))
    return losses


def moved_apart(mine: dict[str, Tensor], theirs: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    """Largest difference of a tensor, relative to how far training has moved it; every one must have moved."""
    assert mine.keys() == theirs.keys() == before.keys()
    moved = {name: float((theirs[name] - before[name]).norm()) for name in theirs}
    assert min(moved.values()) > 0, min(moved, key=lambda name: moved[name])
    return max(float((mine[name] - theirs[name]).norm()) / moved[name] for name in mine)


def trained(model: nn.Module) -> dict[str, Tensor]:
    """What is trained, by name, as it is now."""
    return {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}
