"""Which segments a recurrent layer computes in one call: groups of one depth, and their tables, on the host.

S segments, n of a group.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

CHUNK = 64
"""Tokens that the delta rule computes at a time; flash-linear-attention's, which `Group.chunk_indices` is made for."""

GROUP = 128
"""Segments of one recurrent call. Their states take 512 MiB at 64 heads of 128 x 128 in float32."""


class Group:
    """Up to GROUP segments of one depth, in buffer order: one call of a recurrent kernel.

    segments: their indices. lengths: theirs. tokens: sum of lengths. stored: how many of them have children.
    cu_seqlens: [n + 1], boundaries of the segments within the group's tokens; cu_seqlens_cpu: the same on the host.
    chunk_indices: [chunks, 2], (segment, chunk) for chunks of CHUNK tokens.
    parent_slot: [n], each segment's parent among the stored states of the depth above, ascending; empty for roots.
    children: [m], how many of the group's segments are below each stored state of the depth above.
    keep: [stored], which of the segments have children: their final states are stored, in this order.

    For a padded batch, longest segment first: step i holds the i-th chunk of the active[i] segments that have one, in
    chunks of `chunk` tokens.
    by_length: [n], that order. slots: [tokens], place of each token among sum(active) * chunk.
    keep_by_length: [stored], place of each kept segment in that order.
    """

    TABLES: ClassVar[tuple[str, ...]] = (
        "cu_seqlens",
        "chunk_indices",
        "parent_slot",
        "children",
        "keep",
        "by_length",
        "slots",
        "keep_by_length",
    )

    segments: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int
    stored: int
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    chunk_indices: Tensor
    parent_slot: Tensor
    children: Tensor
    keep: Tensor
    chunk: int
    active: tuple[int, ...]
    by_length: Tensor
    slots: Tensor
    keep_by_length: Tensor


def levels_of(lengths: Ints, parents: Ints, depths: Ints, by_depth: Ints, most: int) -> tuple[tuple[Group, ...], ...]:
    """For each depth its groups, of at most `most` segments each.

    lengths, parents (-1: a root), depths: [S], in depth-first order. by_depth: [S], segments sorted by depth, stably.
    """
    has_children = np.zeros(len(lengths), dtype=bool)
    has_children[parents[parents >= 0]] = True
    slot = np.zeros(len(lengths), dtype=np.int64)
    levels = []
    stored_above = 0
    for segments in np.split(by_depth, np.flatnonzero(np.diff(depths[by_depth])) + 1):
        kept = segments[has_children[segments]]
        slot[kept] = np.arange(len(kept))
        levels.append(
            tuple(
                _make_group(part, lengths[part], has_children[part], slot[parents[part]], stored_above)
                for part in np.split(segments, range(most, len(segments), most))
            )
        )
        stored_above = len(kept)
    return tuple(levels)


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """start, start + 1, ... for each of the lengths, one after the other."""
    offset = np.cumsum(lengths) - lengths
    return np.repeat(starts - offset, lengths) + np.arange(lengths.sum())


def chunk_indices(lengths: Ints) -> Ints:
    """[chunks, 2]: (segment, chunk) for chunks of CHUNK tokens."""
    chunks = -(-lengths // CHUNK)
    return np.stack([np.repeat(np.arange(len(lengths)), chunks), ranges(np.zeros_like(chunks), chunks)], 1)


def _make_group(
    segments: Ints, lengths: Ints, has_children: npt.NDArray[np.bool_], parent_slot: Ints, stored_above: int
) -> Group:
    group = Group()
    group.segments, group.lengths, group.tokens = tuple(segments.tolist()), tuple(lengths.tolist()), int(lengths.sum())
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    parent_slot = parent_slot[: len(segments) if stored_above else 0]
    keep = np.flatnonzero(has_children)
    group.stored = len(keep)
    group.cu_seqlens_cpu = torch.from_numpy(cu_seqlens)
    group.cu_seqlens = group.cu_seqlens_cpu
    group.chunk_indices = torch.from_numpy(chunk_indices(lengths))
    group.parent_slot = torch.from_numpy(parent_slot)
    group.children = torch.from_numpy(np.bincount(parent_slot, minlength=stored_above).astype(np.int64))
    group.keep = torch.from_numpy(keep)
    _pad_group(group, lengths, keep)
    return group


def _pad_group(group: Group, lengths: Ints, keep: Ints) -> None:
    by_length = np.argsort(-lengths, kind="stable")
    place = np.empty_like(by_length)
    place[by_length] = np.arange(len(lengths))
    group.chunk = min(CHUNK, int(lengths.max()))
    steps = -(-lengths // group.chunk)
    active = (steps > np.arange(steps.max())[:, None]).sum(1)
    before = np.cumsum(active) - active
    token = ranges(np.zeros_like(lengths), lengths)
    step, within = np.divmod(token, group.chunk)
    slots = (before[step] + np.repeat(place, lengths)) * group.chunk + within
    group.active = tuple(active.tolist())
    group.by_length, group.slots = torch.from_numpy(by_length), torch.from_numpy(slots)
    group.keep_by_length = torch.from_numpy(place[keep])
