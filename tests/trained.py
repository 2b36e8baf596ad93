"""A tiny adapted model and a training loop of a few lines, for tests of checkpoints and exports."""

from __future__ import annotations

import torch
from peft import PeftModel
from torch import Tensor, nn

from configs.schema import AdapterConfig
from prefix_train import adapters
from tests import models


def adapted(family: str = "qwen3_5", seed: int = 0, rank: int = 4) -> PeftModel:
    """A tiny model with adapters, and mergers where it has a vision tower; none of the adapters is zero."""
    targets = ["q_proj", "v_proj"] if family in models.WITHOUT_GATE else AdapterConfig().targets
    model = adapters.attach(models.build(family), AdapterConfig(rank=rank, targets=targets), seed)
    with torch.no_grad():
        for name, parameter in trainable(model).items():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.05, generator=torch.Generator().manual_seed(seed))
    return model


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Trained parameters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """An optimizer for all of them."""
    return torch.optim.AdamW(trainable(model).values(), lr=5e-3, betas=(0.9, 0.95))


def inputs(update: int) -> dict[str, Tensor]:
    """One text with one image of 2 x 2 patches (a token), drawn from `update`."""
    generator = torch.Generator().manual_seed(update)
    ids = torch.randint(0, 80, (1, 12), generator=generator)
    ids[0, 4:7] = torch.tensor([models.VISION_START, models.IMAGE, 0])
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(4, models.PATCH_VALUES, generator=generator),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "mm_token_type_ids": (ids == models.IMAGE).long(),
    }


def loss(model: nn.Module, update: int, images: bool = True) -> Tensor:
    """A scalar that depends on every trained tensor, and on noise from the running generator."""
    given = inputs(update)
    if not images:
        given = {"input_ids": given["input_ids"]}
    logits = model(**given, use_cache=False).logits
    noise = 1 + 0.1 * torch.rand(logits.shape)
    return (nn.functional.log_softmax(logits, -1) * noise)[..., 5].mean().neg()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, updates: range) -> list[float]:
    """Losses of these updates."""
    losses = []
    for update in updates:
        value = loss(model, update)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses
