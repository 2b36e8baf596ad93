"""Dropout whose masks are functions of where they are, never of a generator's running state.

A mask's seed is made of (run, update, pack, layer, module). The first three travel with the pack's layout, which each
decoder layer is given by keyword, in its recomputation too; the last two are the module's own name.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


class SeededDropout(nn.Module):
    """Drops entries with probability `p` and scales the rest by 1 / (1 - p), in training only.

    `draw` names (run, update, pack) and is set before each forward by the layer that owns the module. Raises
    RuntimeError in training where it was not: a mask would come from nowhere.
    """

    def __init__(self, p: float, place: str) -> None:
        super().__init__()
        self.p, self.place = p, place
        self.draw: str | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """`inputs` of any shape."""
        if not self.training or self.p == 0:
            return inputs
        if self.draw is None:
            raise RuntimeError(f"{self.place}: dropout without a draw (run, update, pack)")
        generator = torch.Generator(inputs.device).manual_seed(seed_of(self.draw, self.place))
        keep = torch.rand(inputs.shape, generator=generator, device=inputs.device) >= self.p
        return inputs * keep / (1 - self.p)

    def extra_repr(self) -> str:
        """Shown in the model's print."""
        return f"p={self.p}"


def seed_of(*names: str) -> int:
    """63-bit seed that is a function of `names` alone."""
    return int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:8], "big") >> 1


def set_draw(dropouts: list[SeededDropout], draw: str | None) -> None:
    """Say which (run, update, pack) the next masks belong to."""
    for dropout in dropouts:
        dropout.draw = draw


def find(module: nn.Module) -> list[SeededDropout]:
    """All seeded dropouts below `module`."""
    return [child for child in module.modules() if isinstance(child, SeededDropout)]
