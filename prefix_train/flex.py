"""FlexAttention over a forest of segments (CUDA), with a block mask made from the segment table.

Key token k is seen by the tokens from k to `visible_until[k]`, one range. So a block of keys is seen by a union of
ranges, one per segment that it touches, and in full by a single range: nothing of size T x T is ever made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from configs.errors import UserError
from prefix_train.layout import Layout

BLOCK = 128
"""Tokens of a block, both of queries and of keys: FlexAttention's default."""

_masks: WeakKeyDictionary[Layout, BlockMask] = WeakKeyDictionary()


def flex_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """query [1, Hq, T, D] on key and value [1, Hk, T, D] -> [1, T, Hq, D]. UserError off CUDA: no backward there."""
    if query.device.type != "cuda":
        raise UserError(f"attention kernels 'flex' run on CUDA, not on {query.device.type}: set model.attention=merged")
    if layout not in _masks:
        _masks[layout] = block_mask(layout)
    out: Tensor = _compiled()(
        query, key, value, block_mask=_masks[layout], scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2)


def block_mask(layout: Layout) -> BlockMask:
    """FlexAttention's mask of a layout, on its device; built once per pack from the segments, on the host."""
    seen, in_full = (_send(torch.from_numpy(table), layout.device) for table in blocks_seen(layout))
    until = layout.visible_until

    def visible(batch: Tensor, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return (col <= row) & (row < until[col])

    return BlockMask.from_kv_blocks(
        *_ordered(seen & ~in_full),
        *_ordered(in_full),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(layout.total, layout.total),
    )


def blocks_seen(layout: Layout, block: int = BLOCK) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Which blocks of queries (rows) see something of, and which see all of, which blocks of keys: two bool [n, n]."""
    count = -(-layout.total // block)
    starts = np.array(layout.starts)
    stops, ends = starts + np.array(layout.lengths), np.array(layout.subtree_ends)
    # One entry for each segment in each block of keys that it touches.
    first = starts // block
    touched = (stops - 1) // block - first + 1
    segment = np.repeat(np.arange(len(starts)), touched)
    col = np.arange(len(segment)) - np.repeat(np.cumsum(touched) - touched, touched) + first[segment]
    row_first = np.maximum(starts[segment], col * block) // block
    row_last = (ends[segment] - 1) // block
    steps = np.zeros((count + 1, count), dtype=np.int32)
    np.add.at(steps, (row_first, col), 1)
    np.add.at(steps, (row_last + 1, col), -1)
    seen = steps.cumsum(0, dtype=np.int32)[:-1] > 0

    all_end = np.full(count, layout.total)
    np.minimum.at(all_end, col, ends[segment])
    rows = np.arange(count)[:, None] * block
    cols = np.arange(count)[None] * block
    # A last block that is not full stays with those whose bounds the kernel checks.
    whole = (rows + block <= layout.total) & (cols + block <= layout.total)
    in_full = whole & (rows >= cols + block - 1) & (rows + block <= all_end[None])
    return seen, in_full


def _send(table: Tensor, device: torch.device) -> Tensor:
    # The first layer that asks makes the mask: pinned, so that it does not wait for the device.
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [n, n] -> how many blocks of keys each row has [1, 1, n], and their indices first [1, 1, n, n]."""
    counts = blocks.sum(-1, dtype=torch.int32)
    indices = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], indices[None, None]


@functools.cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(torch_flex_attention, dynamic=True)
