"""What joins attention's pieces, in one pass each: outputs by their log-sum-exp, and gradients that add up.

Nothing between the pieces and the result is written: each row's pieces are read once, weighed in float32 in registers
and rounded once. A row has as many pieces as its segment has ancestors, and its own; where they lie is in two tables,
one of the layout's, made once per pack, and one of addresses, sent with each call. Kernels in Triton: `tables` alone
needs none. Offsets are 64 bits wide.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from configs.errors import UserError
from prefix_train.kernel_choice import LARGEST_HEAD as LARGEST
from prefix_train.layout import Layout

ROWS = 16
"""Rows of one program."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tables:
    """Of one layout, int64, on its device.

    tiles: [programs, 2], segment and first row in it, for ROWS rows that lie in one segment.
    segments: [S, 6], first token; tokens; block, and place in it; parent, -1 for a root; rectangle in which the
    segment's descendants read it, -1 where it has none. Blocks and rectangles are counted as the layout has them.
    depth: most ancestors of a segment.
    """

    __slots__ = ("depth", "segments", "tiles")

    def __init__(self, tiles: Tensor, segments: Tensor, depth: int) -> None:
        self.tiles, self.segments, self.depth = tiles, segments, depth


_tables: WeakKeyDictionary[Layout, Tables] = WeakKeyDictionary()


def require(query: Tensor) -> None:
    """Raise UserError, naming it, for what the kernels do not take: query [1, Hq, T, D]."""
    size = query.shape[3]
    if query.dtype not in DTYPES or size > LARGEST:
        named = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise UserError(
            f"attention kernels 'joined' take {named} with heads of up to {LARGEST}, not {query.dtype} with heads of "
            f"{size}: set model.attention=merged"
        )


def tables(layout: Layout) -> Tables:
    """Made once per pack, on the host; sent without waiting for the device."""
    if layout not in _tables:
        lengths, starts = np.array(layout.lengths), np.array(layout.starts)
        segments = np.full((len(lengths), 6), -1, dtype=np.int64)
        segments[:, 0], segments[:, 1], segments[:, 4] = starts, lengths, layout.parents
        for number, block in enumerate(layout.blocks):
            members = np.flatnonzero(lengths == block.length)
            segments[members, 2], segments[members, 3] = number, np.arange(len(members))
        for number, node in enumerate(layout.rectangles):
            segments[np.searchsorted(starts, node.col_start), 5] = number
        count = -(-lengths // ROWS)
        segment = np.repeat(np.arange(len(lengths)), count)
        first = (np.arange(len(segment)) - np.repeat(np.cumsum(count) - count, count)) * ROWS
        tiles = np.stack([segment, first], 1)
        sent = [_send(torch.from_numpy(x), layout.device) for x in (tiles, segments)]
        _tables[layout] = Tables(sent[0], sent[1], max(layout.depths))
    return _tables[layout]


def join(parts: Sequence[Tensor], lses: Sequence[Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
    """One softmax from its pieces.

    parts: outputs of the layout's blocks, then of its rectangles, [count, H, length, D] and [1, H, rows, D]. lses:
    their log-sum-exps, float32. Returns the output [1, T, H, D], contiguous, and log-sum-exp [1, H, T] in float32.
    """
    heads, size = parts[0].shape[1], parts[0].shape[3]
    out = parts[0].new_empty(1, layout.total, heads, size)
    lse = torch.empty(1, heads, layout.total, dtype=torch.float32, device=out.device)
    _launch(parts, lses, layout, out.transpose(1, 2), lse)
    return out, lse


def add(parts: Sequence[Tensor], layout: Layout, like: Tensor) -> Tensor:
    """Sum of each row's pieces, given as in `join`; [1, H, T, D] with the dtype and strides of `like`."""
    out = torch.empty_like(like)
    _launch(parts, None, layout, out, None)
    return out


def add_heads(total: Tensor, part: Tensor, start: int | None, rows: Tensor | None, more: bool) -> None:
    """Sum groups of heads of `part` [count, Hq, length, D] in float32 into `total` [1, Hk, T, D], float32.

    Its tokens are those from `start` on, or `rows`. more: add to what is there.
    """
    _kernels("add_heads")(total, _rows_whole(part), start, rows, more)


def _launch(
    parts: Sequence[Tensor], lses: Sequence[Tensor] | None, layout: Layout, out: Tensor, lse: Tensor | None
) -> None:
    whole = [_rows_whole(part) for part in parts]
    _kernels("join")(_addresses(whole, lses), len(layout.blocks), tables(layout), out, lse)


def _addresses(parts: Sequence[Tensor], lses: Sequence[Tensor] | None) -> Tensor:
    """[pieces, 8] int64: address and strides (batch, head, row) of each piece and of its log-sum-exp."""
    found = np.zeros((len(parts), 8), dtype=np.int64)
    for number, part in enumerate(parts):
        found[number, :4] = part.data_ptr(), *part.stride()[:3]
        if lses is not None:
            found[number, 4:] = lses[number].data_ptr(), *lses[number].stride()
    return _send(torch.from_numpy(found), parts[0].device)


def _rows_whole(part: Tensor) -> Tensor:
    # A row's elements are read side by side, 16 bytes at a time.
    sixteen = 16 // part.element_size()
    straight = part.stride(3) == 1 and not any(stride % sixteen for stride in part.stride()[:3])
    return part if straight and part.data_ptr() % 16 == 0 else part.contiguous()


def _send(table: Tensor, device: torch.device) -> Tensor:
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def _kernels(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module("prefix_train.joined_triton"), name)
    return found
