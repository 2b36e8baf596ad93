"""Dropout whose masks are functions of where they are, never of a generator's running state.

A mask's seed is made of (run, update, pack, layer, module, block of rows). The first three travel with the pack's
layout, which each decoder layer is given by keyword, in its recomputation too; the next two are the module's own name.
Blocks of rows have seeds of their own so that a part of the rows can be drawn by itself.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

BLOCK = 2048
"""Rows whose masks come from one seed."""


class SeededDropout(nn.Module):
    """Drops entries with probability `p` and scales the rest by 1 / (1 - p), in training only.

    `draw` names (run, update, pack) and is set before each forward by the layer that owns the module. Raises
    RuntimeError in training where it was not: a mask would come from nowhere. `first_row`, a multiple of BLOCK: where
    the rows of the next inputs begin in the pack.
    """

    def __init__(self, p: float, place: str) -> None:
        super().__init__()
        self.p, self.place = p, place
        self.draw: str | None = None
        self.first_row = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """`inputs`: [..., D]; rows are all dimensions but the last."""
        if not self.training or self.p == 0:
            return inputs
        if self.draw is None:
            raise RuntimeError(f"{self.place}: dropout without a draw (run, update, pack)")
        return inputs * self._keep(self.draw, inputs) / (1 - self.p)

    def _keep(self, draw: str, inputs: Tensor) -> Tensor:
        """Which entries stay, bool of the inputs' shape."""
        keep = torch.empty(inputs.shape, dtype=torch.bool, device=inputs.device)
        first, odd = divmod(self.first_row, BLOCK)
        if odd:
            raise ValueError(f"{self.place}: rows from {self.first_row} on do not begin a block of {BLOCK}")
        for block, part in enumerate(torch.split(keep.view(-1, keep.shape[-1]), BLOCK), first):
            generator = torch.Generator(inputs.device).manual_seed(seed_of(draw, self.place, str(block)))
            torch.ge(torch.rand(part.shape, generator=generator, device=inputs.device), self.p, out=part)
        return keep

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
