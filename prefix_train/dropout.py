"""Dropout whose masks are functions of where they are, never of a generator's running state.

A mask's seed is made of (run, update, pack, layer, module, block of rows). The first three travel with the pack's
layout, which each decoder layer is given by keyword, in its recomputation too; the next two are the module's own name.
Blocks of rows have seeds of their own so that a part of the rows can be drawn by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from prefix_train import counted

BLOCK = 2048
"""Rows whose masks come from one seed."""

IN_REGISTERS, WRITTEN = "in registers", "written out"
"""Where a counted mask is made."""


class SeededDropout(nn.Module):
    """Drops entries with probability `p` and scales the rest by 1 / (1 - p), in training only.

    `draw` names (run, update, pack) and is set before each forward by the layer that owns the module. Raises
    RuntimeError in training where it was not: a mask would come from nowhere. `first_row`, a multiple of BLOCK: where
    the rows of the next inputs begin in the pack. counted: its masks are those of `counted`, by which p is rounded.
    made: how counted masks have been made so far, of IN_REGISTERS and WRITTEN. held: where counted masks find their
    seed, int64 [], instead of making it of `draw`: what is launched again and again then need not be told.
    """

    def __init__(self, p: float, place: str, counted: bool = False) -> None:
        super().__init__()
        self.p, self.place, self.counted = p, place, counted
        self.draw: str | None = None
        self.held: Tensor | None = None
        self.first_row = 0
        self.made: set[str] = set()

    def forward(self, inputs: Tensor) -> Tensor:
        """`inputs`: [..., D]; rows are all dimensions but the last."""
        keep = self.keep(inputs)
        if keep is None:
            return inputs
        return inputs * keep.bool() / (1 - self.dropped)  # a byte for each entry waits for backward

    def keep(self, inputs: Tensor) -> Tensor | None:
        """Which entries stay: ones and zeros of the inputs' shape and dtype; None where all do."""
        if not self.training or self.p == 0:
            return None
        if self.counted:
            self.made.add(WRITTEN)
            columns = inputs.shape[-1]
            rows = inputs.numel() // columns
            return counted.keep(self.drawn(), rows, columns, inputs.device, inputs.dtype).view(inputs.shape)
        draw = self._require_draw()
        keep = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
        first, odd = divmod(self.first_row, BLOCK)
        if odd:
            raise ValueError(f"{self.place}: rows from {self.first_row} on do not begin a block of {BLOCK}")
        for block, part in enumerate(torch.split(keep.view(-1, keep.shape[-1]), BLOCK), first):
            generator = torch.Generator(inputs.device).manual_seed(seed_of(draw, self.place, str(block)))
            part.bernoulli_(1 - self.p, generator=generator)
        return keep

    def drawn(self) -> counted.Draw:
        """What a counted mask is drawn from."""
        seed = self.seed(self._require_draw()) if self.held is None else self.held
        return counted.Draw(seed, self.first_row, counted.least_of(self.p))

    def seed(self, draw: str) -> int:
        """Of a counted mask, in (run, update, pack)."""
        return seed_of(draw, self.place)

    @property
    def dropped(self) -> float:
        """Share of the entries that are dropped."""
        return counted.least_of(self.p) / (1 << counted.BITS) if self.counted else self.p

    def _require_draw(self) -> str:
        if self.draw is None:
            raise RuntimeError(f"{self.place}: dropout without a draw (run, update, pack)")
        return self.draw

    def extra_repr(self) -> str:
        """Shown in the model's print."""
        return f"p={self.p}"


def seed_of(*names: str) -> int:
    """63-bit seed that is a function of `names` alone."""
    return int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:8], "big") >> 1


def set_draw(dropouts: Sequence[SeededDropout], draw: str | None) -> None:
    """Say which (run, update, pack) the next masks belong to."""
    for dropout in dropouts:
        dropout.draw = draw


def draw_of(dropouts: Sequence[SeededDropout]) -> str | None:
    """(run, update, pack) of the present forward; None where nothing drops."""
    return dropouts[0].draw if dropouts else None


def tiles(dropouts: Sequence[SeededDropout], count: int, rows: int) -> Iterator[slice]:
    """Slices of `rows` of the next `count` rows, each dropout told where they begin."""
    before = [one.first_row for one in dropouts]
    try:
        for start in range(0, count, rows):
            for one, first in zip(dropouts, before, strict=True):
                one.first_row = first + start
            yield slice(start, min(start + rows, count))
    finally:
        for one, first in zip(dropouts, before, strict=True):
            one.first_row = first


def find(module: nn.Module) -> list[SeededDropout]:
    """All seeded dropouts below `module`."""
    return [child for child in module.modules() if isinstance(child, SeededDropout)]


def counted_masks(module: nn.Module) -> str | None:
    """How the counted masks below `module` have been made so far; None where masks are not counted."""
    dropouts = [one for one in find(module) if one.counted]
    if not dropouts:
        return None
    written = [one.place for one in dropouts if WRITTEN in one.made]
    if not any(IN_REGISTERS in one.made for one in dropouts):
        return WRITTEN if written else "none made"
    more = f"; {WRITTEN} in {len(written)} of {len(dropouts)} modules, {written[0]} the first" if written else ""
    return IN_REGISTERS + more
