"""The forest of segments of one pack, and every index table that a layer needs, built once per pack.

T positions, S segments, L levels (depth + 1), W width of a causal convolution. Everything follows from
`(lengths, parents)` in depth-first order. `Layout` is a plain class on purpose: FSDP2 rebuilds dataclasses, named
tuples, dicts and lists among a forward's keywords at every sharded module.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

MAX_HISTORY = 7
"""Inputs before a segment that the history table holds: enough for convolutions of width up to 8."""

CHUNK = 64
"""Chunk length of flash-linear-attention's delta rule, which `Level.chunk_indices` is made for."""


class Rectangle:
    """Descendants `rows` of one node read that node's tokens `cols` in full, unmasked. Half-open token ranges."""

    __slots__ = ("col_end", "col_start", "row_end", "row_start")

    def __init__(self, col_start: int, col_end: int, row_start: int, row_end: int) -> None:
        self.col_start, self.col_end, self.row_start, self.row_end = col_start, col_end, row_start, row_end


class Level:
    """All segments of one depth, in buffer order: one variable-length call of a recurrent kernel.

    segments: their indices. lengths: theirs, as integers.
    rows: [sum of lengths], buffer positions of their tokens. span: (start, end) where those are contiguous, else None.
    cu_seqlens, cu_seqlens_cpu: [n + 1] int32, boundaries within `rows`, on the layout's device and on the host.
    chunk_indices: [chunks, 2] int32, (segment, chunk) for chunks of CHUNK tokens.
    parent_slot: [n], each segment's parent among the stored states of the level above; empty at level 0.
    keep: [m], which of these segments have children: their final states are stored, in this order.
    """

    __slots__ = (
        "chunk_indices",
        "cu_seqlens",
        "cu_seqlens_cpu",
        "keep",
        "lengths",
        "parent_slot",
        "rows",
        "segments",
        "span",
    )

    segments: tuple[int, ...]
    lengths: tuple[int, ...]
    span: tuple[int, int] | None
    rows: Tensor
    cu_seqlens: Tensor
    cu_seqlens_cpu: Tensor
    chunk_indices: Tensor
    parent_slot: Tensor
    keep: Tensor


class Layout:
    """A forest of segments in depth-first order.

    Host side, as integers: lengths, parents (-1: a root), starts, depths, subtree_ends (token index after the last
    descendant), total (T), rectangles. On `device`, int64 unless said otherwise: segment_of [T], history
    [S, MAX_HISTORY] (buffer positions of the inputs before each segment on its root path, oldest first, -1 where there
    are none), positions [T], levels.
    """

    builds = 0
    """Layouts built by this process (moving one to a device builds none); a test holds it to one per pack."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    starts: tuple[int, ...]
    depths: tuple[int, ...]
    subtree_ends: tuple[int, ...]
    total: int
    rectangles: tuple[Rectangle, ...]
    levels: tuple[Level, ...]
    segment_of: Tensor
    history: Tensor
    positions: Tensor

    @classmethod
    def from_tree(cls, lengths: Sequence[int], parents: Sequence[int]) -> Layout:
        """Build all tables for segments in depth-first order.

        lengths: tokens of each segment, at least 1. parents: index of each segment's parent, -1 for a root.
        Raises ValueError where the two do not describe a forest in depth-first order.
        """
        layout = cls()
        layout.lengths, layout.parents = tuple(map(int, lengths)), tuple(map(int, parents))
        layout._check_depth_first()
        layout._lay_out_segments()
        layout._build_token_tables()
        layout._build_levels()
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
        if torch.device(device) == self.device:
            return self
        tables = self._tables()
        flat = torch.cat([table.reshape(-1).to(torch.int64) for table in tables])
        if torch.device(device).type == "cuda":
            flat = flat.pin_memory()
        moved = torch.split(flat.to(device, non_blocking=non_blocking), [table.numel() for table in tables])
        return self._with_tables([new.view(old.shape).to(old.dtype) for new, old in zip(moved, tables, strict=True)])

    def visible(self) -> Tensor:
        """[T, T] bool: may row (query) see column (key). For references and tests; quadratic memory."""
        first = torch.tensor(self.starts, device=self.device)[self.segment_of]
        end = torch.tensor(self.subtree_ends, device=self.device)[self.segment_of]
        token = torch.arange(self.total, device=self.device)
        return (token[None] <= token[:, None]) & (first[None] <= token[:, None]) & (token[:, None] < end[None])

    def root_path(self, segment: int) -> list[int]:
        """Segments from the root down to `segment`, itself included."""
        path = [segment]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def _check_depth_first(self) -> None:
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
        lengths = torch.tensor(self.lengths)
        self.segment_of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        before: list[int] = []
        history: list[list[int]] = []
        for start, length, parent in zip(self.starts, self.lengths, self.parents, strict=True):
            before.append(before[parent] + self.lengths[parent] if parent >= 0 else 0)
            own = list(range(max(start, start + length - MAX_HISTORY), start + length))
            above = history[parent] if parent >= 0 else []
            history.append((above + own)[-MAX_HISTORY:])
        inherited = [history[parent] if parent >= 0 else [] for parent in self.parents]
        self.history = torch.tensor([[-1] * (MAX_HISTORY - len(rows)) + rows for rows in inherited])
        offset = torch.tensor(before) - torch.tensor(self.starts)
        self.positions = torch.arange(self.total) + offset[self.segment_of]

    def _build_levels(self) -> None:
        has_children = set(self.parents)
        slot: dict[int, int] = {}
        levels = []
        for depth in range(max(self.depths) + 1):
            segments = tuple(s for s, d in enumerate(self.depths) if d == depth)
            level = Level()
            level.segments, level.lengths = segments, tuple(self.lengths[s] for s in segments)
            ranges = [(self.starts[s], self.starts[s] + self.lengths[s]) for s in segments]
            adjacent = all(left[1] == right[0] for left, right in pairwise(ranges))
            level.span = (ranges[0][0], ranges[-1][1]) if adjacent else None
            level.rows = torch.cat([torch.arange(*pair) for pair in ranges])
            level.cu_seqlens_cpu = torch.tensor([0, *level.lengths]).cumsum(0).to(torch.int32)
            level.cu_seqlens = level.cu_seqlens_cpu
            chunks = [(i, c) for i, n in enumerate(level.lengths) for c in range(-(-n // CHUNK))]
            level.chunk_indices = torch.tensor(chunks, dtype=torch.int32)
            level.parent_slot = torch.tensor([slot[self.parents[s]] for s in segments if depth], dtype=torch.int64)
            kept = [i for i, s in enumerate(segments) if s in has_children]
            slot = {segments[i]: place for place, i in enumerate(kept)}
            level.keep = torch.tensor(kept, dtype=torch.int64)
            levels.append(level)
        self.levels = tuple(levels)

    def _tables(self) -> list[Tensor]:
        tables = [self.segment_of, self.history, self.positions]
        for level in self.levels:
            tables += [level.rows, level.cu_seqlens, level.chunk_indices, level.parent_slot, level.keep]
        return tables

    def _with_tables(self, tables: list[Tensor]) -> Layout:
        copy = Layout()
        copy.lengths, copy.parents, copy.starts, copy.depths = self.lengths, self.parents, self.starts, self.depths
        copy.subtree_ends, copy.total, copy.rectangles = self.subtree_ends, self.total, self.rectangles
        remaining = iter(tables)
        copy.segment_of, copy.history, copy.positions = next(remaining), next(remaining), next(remaining)
        levels = []
        for old in self.levels:
            new = Level()
            new.segments, new.lengths, new.span = old.segments, old.lengths, old.span
            new.cu_seqlens_cpu = old.cu_seqlens_cpu
            new.rows, new.cu_seqlens, new.chunk_indices = next(remaining), next(remaining), next(remaining)
            new.parent_slot, new.keep = next(remaining), next(remaining)
            levels.append(new)
        copy.levels = tuple(levels)
        return copy
