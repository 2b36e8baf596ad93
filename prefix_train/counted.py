"""Dropout masks that are computed where they are used: each entry is a function of a seed, its row and its column.

Philox-4x32 with 7 rounds, the seed its key, counters (column // 8, row, 0, 0): four words of 32 bits, and so 16 bits
for each of eight columns. An entry is dropped where its bits are below p x 2^16: p is rounded to a multiple of 2^-16.
On a GPU with Triton an adapter's products draw them in registers (`counted_triton`); elsewhere `keep` writes them out.
(J. K. Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011; 7 rounds are the fewest that they find sound.)
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from configs.rules import COUNTED_RANK

ROUNDS, BITS, EACH = 7, 16, 8
"""Of Philox; of an entry; entries of one call."""

_MULTIPLIERS, _WEYL, _WORD = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 0xFFFFFFFF

AT_ONCE = 1 << 21
"""Entries that are written out at a time."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Draw(NamedTuple):
    """Where a mask's entries are: of rows from `first_row` on. least: an entry with fewer is dropped. seed: of 63 bits,
    or where it is found when the mask is made, int64 [] on the mask's device."""

    seed: int | Tensor
    first_row: int
    least: int

    @property
    def p(self) -> float:
        """Share of the entries that are dropped."""
        return self.least / (1 << BITS)


def least_of(p: float) -> int:
    """`Draw.least` for a probability."""
    return round(p * (1 << BITS))


def keep(draw: Draw, rows: int, columns: int, device: torch.device, dtype: torch.dtype = torch.bool) -> Tensor:
    """[rows, columns]: which entries stay. Besides, it takes about 30 MiB, however large the mask is."""
    stays = torch.empty(rows, columns, dtype=dtype, device=device)
    each = max(1, AT_ONCE // columns)
    for first in range(0, rows, each):
        part = stays[first : first + each]
        part.copy_(_stays(draw._replace(first_row=draw.first_row + first), len(part), columns, device))
    return stays


def _stays(draw: Draw, rows: int, columns: int, device: torch.device) -> Tensor:
    """`keep`, all at once: words of 64 bits take many times what they decide."""
    groups = -(-columns // EACH)
    row = (torch.arange(rows, device=device)[:, None] + draw.first_row).expand(rows, groups)
    words = _philox(torch.arange(groups, device=device).expand(rows, groups), row, draw.seed)
    parts = [half >= draw.least for word in words for half in (word & 0xFFFF, word >> BITS)]
    return torch.stack(parts, -1).view(rows, groups * EACH)[:, :columns]


def _philox(first: Tensor, second: Tensor, seed: int | Tensor) -> list[Tensor]:
    """Four words of 32 bits in int64."""
    words = [first, second, torch.zeros_like(first), torch.zeros_like(first)]
    keys = [seed & _WORD, (seed >> 32) & _WORD]
    for _ in range(ROUNDS):
        (high_a, low_a), (high_b, low_b) = (
            _product(word, by) for word, by in zip(words[::2], _MULTIPLIERS, strict=True)
        )
        words = [high_b ^ words[1] ^ keys[0], low_b, high_a ^ words[3] ^ keys[1], low_a]
        keys = [(key + step) & _WORD for key, step in zip(keys, _WEYL, strict=True)]
    return words


def _product(word: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """High and low word of a product of 32 bits each; int64 has a sign."""
    low = (word & 0xFFFF) * by
    high = (word >> 16) * by + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def available(device: torch.device) -> bool:
    """Can kernels run there?"""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def in_registers(x: Tensor, a: Tensor) -> bool:
    """Do the kernels take an adapter's input [n, in] and its first factor [rank, in]?"""
    return fits(x, a) and available(x.device)


def fits(x: Tensor, a: Tensor) -> bool:
    """As `in_registers`, wherever they are."""
    return x.dtype in DTYPES and a.dtype == x.dtype and x.stride(1) == 1 and len(a) <= COUNTED_RANK


def down(x: Tensor, a: Tensor, draw: Draw) -> Tensor:
    """(x with entries dropped) @ a.T: [n, in] on [rank, in] -> [n, rank]; without the scale of what stays."""
    found: Tensor = _kernels().down(x, a.contiguous(), draw)
    return found


def back(up: Tensor, x: Tensor, a: Tensor, draw: Draw, into: Tensor | None, more: bool) -> Tensor:
    """Gradient of `a`, [rank, in] in float32: up.T @ (x with entries dropped). up: [n, rank], that of the rank-wide
    product. That of x is put into `into`, [n, in]; more: added to what is there."""
    found: Tensor = _kernels().back(up, x, a.contiguous(), draw, into, more)
    return found


def _kernels() -> Any:
    return importlib.import_module("prefix_train.counted_triton")
