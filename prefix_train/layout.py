"""The forest of segments of one pack, and every index table that a layer needs, built once per pack.

T positions, S segments, W width of the model's causal convolution. Everything follows from `(lengths, parents)` in
depth-first order, on the host; `to` copies all tables to a device in one transfer. `Layout` and its parts are plain
classes on purpose: FSDP2 rebuilds dataclasses, named tuples, dicts and lists among a forward's keywords at every
sharded module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from operator import index
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from prefix_train.groups import GROUP, Group, Ints, chunk_indices, levels_of, ranges

ALIGN = 2
"""Entries of 16 bytes, where each table on a device begins: Triton compiles a kernel anew for a pointer that is not
so aligned."""


class Rectangle:
    """Descendants `rows` of one node read that node's tokens `cols` in full, unmasked. Half-open token ranges."""

    __slots__ = ("col_end", "col_start", "row_end", "row_start")

    def __init__(self, col_start: int, col_end: int, row_start: int, row_end: int) -> None:
        self.col_start, self.col_end, self.row_start, self.row_end = col_start, col_end, row_start, row_end


class Block:
    """All segments of one length: their own causal parts are one batched call.

    count x length tokens: those from `start` on where they are contiguous, else (start None) those of `rows`
    [count * length].
    """

    TABLES: ClassVar[tuple[str, ...]] = ("rows",)

    count: int
    length: int
    start: int | None
    rows: Tensor


class History:
    """Inputs that a causal convolution reads before each segment: the last W - 1 on its root path.

    In the extended buffer each segment follows its W - 1 warm-up rows, [T + S * (W - 1)] rows in all. N of the warm-up
    rows are copies of U different tokens; the rest lie before a root and are zero.
    kept: [T], row of each token. copy_to, copy_from: [N], row and token of each copy, by token and then by row.
    origin: [U], tokens that are copied, ascending. copies: [U], how often each is.
    source: [rows], token of each row, any where the row is zero. added: the warm-up rows. blank: those that are zero.
    owner: [rows], segment of each row.

    For a convolution that is given each segment's warm-up rows, [S * (W - 1)], apart from the buffer:
    before: [S * (W - 1)], token of each, any where it is zero. absent: those that are zero. copied: [N], those that are
    copies, in the order of copy_to. cu_seqlens: [S + 1], boundaries of the segments in the buffer; cu_seqlens_cpu: the
    same on the host. chunk_indices: [chunks, 2], (segment, chunk) for chunks of CHUNK tokens.
    """

    TABLES: ClassVar[tuple[str, ...]] = (
        *("kept", "copy_to", "copy_from", "origin", "copies", "source", "added", "blank", "owner"),
        *("before", "absent", "copied", "cu_seqlens", "chunk_indices"),
    )

    rows: int
    kept: Tensor
    copy_to: Tensor
    copy_from: Tensor
    origin: Tensor
    copies: Tensor
    source: Tensor
    added: Tensor
    blank: Tensor
    owner: Tensor
    before: Tensor
    absent: Tensor
    copied: Tensor
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    chunk_indices: Tensor


class Layout:
    """A forest of segments in depth-first order.

    Host side: lengths, parents (-1: a root), starts, depths, subtree_ends (token index after the last descendant),
    total (T), width (W), rectangles, blocks, levels (for each depth its groups), in_level_order (whether the buffer is
    sorted by depth as it is).
    On `device`, int64: segment_of [T]; positions [T], each token's distance from its root; visible_until [T], token k
    is seen by the tokens from k to visible_until[k]; level_order and level_inverse [T], tokens by depth and back (empty
    where in_level_order); the tables of blocks, history and groups.
    """

    TABLES: ClassVar[tuple[str, ...]] = ("segment_of", "positions", "visible_until", "level_order", "level_inverse")

    builds: ClassVar[int] = 0
    """Layouts built by this process (moving one to a device builds none); a test holds it to one per pack."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    starts: tuple[int, ...]
    depths: tuple[int, ...]
    subtree_ends: tuple[int, ...]
    total: int
    width: int
    rectangles: tuple[Rectangle, ...]
    blocks: tuple[Block, ...]
    history: History
    levels: tuple[tuple[Group, ...], ...]
    in_level_order: bool
    segment_of: Tensor
    positions: Tensor
    visible_until: Tensor
    level_order: Tensor
    level_inverse: Tensor

    draw: str | None = None
    """Names (run, update, pack), from which dropout makes its seeds; set before each training forward."""

    @classmethod
    def from_tree(cls, lengths: Sequence[int], parents: Sequence[int], *, width: int = 4, group: int = GROUP) -> Layout:
        """Build all tables for segments in depth-first order.

        lengths: tokens of each segment, at least 1. parents: index of each segment's parent, -1 for a root.
        width: of the model's causal convolution. group: most segments of one recurrent call.
        Raises ValueError where lengths and parents do not describe a forest in depth-first order, TypeError for a
        number that is no integer.
        """
        layout = cls()
        layout.lengths, layout.parents = tuple(map(index, lengths)), tuple(map(index, parents))
        layout.width = width
        layout._check(group)
        layout._lay_out_segments()
        layout._build_token_tables()
        layout._build_blocks()
        layout._build_history()
        layout._build_levels(group)
        Layout.builds += 1
        return layout

    @property
    def device(self) -> torch.device:
        """Where the index tables are."""
        return self.segment_of.device

    def position_ids(self) -> Tensor:
        """[1, T]: each token's position in its own example, counted from the root. For text; images need 3-D ids."""
        return self.positions[None]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Layout:
        """The same layout with its tables on `device`, copied in one transfer."""
        target = torch.device(device)
        if target == self.device:
            return self
        tables = [getattr(part, name) for part in self._parts() for name in part.TABLES]
        flat = torch.cat([functional.pad(table.flatten(), (0, table.numel() % ALIGN)) for table in tables])
        if target.type == "cuda":
            flat = flat.pin_memory()
        moved = flat.to(target, non_blocking=non_blocking)
        layout = copy.copy(self)
        layout.history = copy.copy(self.history)
        layout.blocks = tuple(copy.copy(block) for block in self.blocks)
        layout.levels = tuple(tuple(copy.copy(group) for group in level) for level in self.levels)
        taken = 0
        for part in layout._parts():
            for name in part.TABLES:
                table = getattr(part, name)
                setattr(part, name, moved[taken : taken + table.numel()].view(table.shape))
                taken += table.numel() + table.numel() % ALIGN
        return layout

    def visible(self) -> Tensor:
        """[T, T] bool: may row (query) see column (key). For references and tests; quadratic memory."""
        token = torch.arange(self.total, device=self.device)
        return (token <= token[:, None]) & (token[:, None] < self.visible_until)

    def root_path(self, segment: int) -> list[int]:
        """Segments from the root down to `segment`, itself included."""
        path = [segment]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def groups(self) -> Iterator[Group]:
        """All groups, by depth: the tokens of `level_order` are theirs, one after the other."""
        for level in self.levels:
            yield from level

    def _parts(self) -> list[Any]:
        return [self, self.history, *self.blocks, *self.groups()]

    def _check(self, group: int) -> None:
        if self.width < 1 or group < 1:
            raise ValueError(f"width is {self.width} and group is {group}; both are at least 1")
        if not self.lengths:
            raise ValueError("a layout needs at least one segment")
        if len(self.lengths) != len(self.parents):
            raise ValueError(f"{len(self.lengths)} lengths, but {len(self.parents)} parents")
        open_path: list[int] = []
        for segment, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True)):
            if length < 1:
                raise ValueError(f"segment {segment} has length {length}; segments have at least one token")
            while open_path and open_path[-1] != parent:
                open_path.pop()
            if parent != -1 and not open_path:
                raise ValueError(f"segment {segment} has parent {parent}: not in depth-first order")
            open_path.append(segment)

    def _lay_out_segments(self) -> None:
        starts: list[int] = []
        depths: list[int] = []
        start = 0
        for length, parent in zip(self.lengths, self.parents, strict=True):
            starts.append(start)
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            start += length
        ends = [begin + length for begin, length in zip(starts, self.lengths, strict=True)]
        for segment in range(len(ends) - 1, -1, -1):
            if (parent := self.parents[segment]) >= 0:
                ends[parent] = max(ends[parent], ends[segment])
        self.starts, self.depths, self.subtree_ends, self.total = tuple(starts), tuple(depths), tuple(ends), start
        self.rectangles = tuple(
            Rectangle(begin, begin + length, begin + length, end)
            for begin, length, end in zip(starts, self.lengths, ends, strict=True)
            if end > begin + length
        )

    def _build_token_tables(self) -> None:
        before: list[int] = []
        for parent in self.parents:
            before.append(before[parent] + self.lengths[parent] if parent >= 0 else 0)
        segment_of = np.repeat(np.arange(len(self.lengths)), self.lengths)
        self.segment_of = torch.from_numpy(segment_of)
        self.positions = torch.from_numpy(ranges(_array(before), _array(self.lengths)))
        self.visible_until = torch.from_numpy(_array(self.subtree_ends)[segment_of])

    def _build_blocks(self) -> None:
        lengths, starts = _array(self.lengths), _array(self.starts)
        blocks = []
        for length in np.unique(lengths):
            of_length = starts[lengths == length]
            adjacent = bool((np.diff(of_length) == length).all())
            rows = _array(()) if adjacent else (of_length[:, None] + np.arange(length)).ravel()
            block = Block()
            block.count, block.length = len(of_length), int(length)
            block.start = int(of_length[0]) if adjacent else None
            block.rows = torch.from_numpy(rows)
            blocks.append(block)
        self.blocks = tuple(blocks)

    def _build_history(self) -> None:
        warm_up = self.width - 1
        copy_to: list[int] = []
        copy_from: list[int] = []
        tails: list[list[int]] = []
        for segment, (start, length, parent) in enumerate(zip(self.starts, self.lengths, self.parents, strict=True)):
            above = tails[parent] if parent >= 0 else []
            copy_from += above
            first = start + (segment + 1) * warm_up
            copy_to += range(first - len(above), first)
            own = range(max(start, start + length - warm_up), start + length)
            tails.append([*above, *own][max(0, len(above) + len(own) - warm_up) :])
        order = np.argsort(_array(copy_from), kind="stable")
        origin, copies = np.unique(_array(copy_from), return_counts=True)
        history = History()
        history.rows = self.total + len(self.lengths) * warm_up
        token = torch.arange(self.total, device="cpu")
        history.kept = token + (self.segment_of + 1) * warm_up
        history.copy_to = torch.from_numpy(_array(copy_to)[order])
        history.copy_from = torch.from_numpy(_array(copy_from)[order])
        history.origin, history.copies = torch.from_numpy(origin), torch.from_numpy(copies.astype(np.int64))
        source = torch.full((history.rows,), -1, device="cpu")
        source[history.kept] = token
        history.added = torch.nonzero(source < 0)[:, 0]
        source[history.copy_to] = history.copy_from
        history.blank = torch.nonzero(source < 0)[:, 0]
        history.source = source.clamp_(min=0)
        lengths = _array(self.lengths)
        history.owner = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths + warm_up))
        history.before = history.source[history.added]
        history.absent = torch.searchsorted(history.added, history.blank)
        history.copied = torch.searchsorted(history.added, history.copy_to)
        history.cu_seqlens_cpu = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        history.cu_seqlens, history.chunk_indices = history.cu_seqlens_cpu, torch.from_numpy(chunk_indices(lengths))
        self.history = history

    def _build_levels(self, most: int) -> None:
        lengths, depths = _array(self.lengths), _array(self.depths)
        by_depth = np.argsort(depths, kind="stable")
        self.levels = levels_of(lengths, _array(self.parents), depths, by_depth, most)
        order = ranges(_array(self.starts)[by_depth], lengths[by_depth])
        self.in_level_order = bool((np.diff(order) == 1).all())
        order = order[:0] if self.in_level_order else order
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        self.level_order, self.level_inverse = torch.from_numpy(order), torch.from_numpy(inverse)


def _array(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)
