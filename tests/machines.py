"""Machines that kernels are chosen for, where there is none."""

from __future__ import annotations

from dataclasses import replace

import torch

from configs.schema import Config
from prefix_train import kernel_choice, machine
from prefix_train.kernel_choice import Machine

H200 = Machine("cuda", (9, 0))
A100 = Machine("cuda", (8, 0))


def with_heads(config: Config, device: torch.device, _: object = None) -> Config:
    """As `machine.settle`, but kernels of heads that are asked for by name are had everywhere."""
    asked, others = config.model.heads, replace(config.model, heads="auto")
    settled = kernel_choice.settle(replace(config, model=others), machine.of(device))
    return settled if asked == "auto" else replace(settled, model=replace(settled.model, heads=asked))
