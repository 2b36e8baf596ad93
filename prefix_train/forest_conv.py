"""The causal convolution of Gated DeltaNet over a forest of segments by kernels of our own, in Triton.

A program walks down the rows of one tile, a run of rows of one segment, and keeps the last rows in registers: every row
is read once and written once, but for the few before a tile (and, in backward, behind it), which two tiles read. Where
the rows before a tile lie, in its own segment or at the end of its root path, is in a table of the layout's, made once
per pack. A row that several segments read has its gradients in float32, one row of a buffer for each, which are added
in a fixed order and rounded once, as every other row is. Nothing else is written. Offsets are 64 bits wide.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from configs.errors import UserError
from prefix_train.kernel_choice import WIDEST as WIDEST
from prefix_train.layout import Layout

ROWS = 64
"""Most rows of a tile."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Ints = npt.NDArray[np.int32]


class Tables:
    """Of one layout, int32, on its device.

    tiles: [N, 4 + 3 * (WIDEST - 1)], a tile's first row, its number of rows, the row after its segment, and the first
    row of the segment that other segments read, the row after it where there is none. Then three times WIDEST - 1
    numbers, -1 where there is nothing: rows 1, 2, ... steps before the tile; slots of the gradients that the segment
    gives to these, in its first tile; slots of those that the segment gives to its own rows that others read, in order.
    runs: [U + 1], begin and end of the slots of each row that several segments read. origin: [U], these rows.
    slots: how many there are.
    """

    __slots__ = ("origin", "runs", "slots", "tiles")

    def __init__(self, tiles: Tensor, runs: Tensor, origin: Tensor, slots: int) -> None:
        self.tiles, self.runs, self.origin, self.slots = tiles, runs, origin, slots


_tables: WeakKeyDictionary[Layout, Tables] = WeakKeyDictionary()


def require(x: Tensor, width: int) -> None:
    """Raise UserError, naming it, for what the kernels do not take: inputs [T, C], a convolution of this width."""
    if x.dtype not in DTYPES or width > WIDEST:
        named = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise UserError(
            f"deltanet kernels 'fla_forest' take {named} and a convolution of a width up to {WIDEST}, not {x.dtype} "
            f"and {width}: set model.deltanet=fla"
        )


def tables(layout: Layout) -> Tables:
    """Made once per pack, on the host; sent without waiting for the device."""
    if layout not in _tables:
        *made, slots = make_tables(layout)
        tiles, runs, origin = (_send(torch.from_numpy(table), layout.device) for table in made)
        _tables[layout] = Tables(tiles, runs, origin, slots)
    return _tables[layout]


def make_tables(layout: Layout) -> tuple[Ints, Ints, Ints, int]:
    """tiles, runs, origin and slots, as `Tables` has them."""
    warm_up, most = layout.width - 1, WIDEST - 1
    starts, lengths = np.array(layout.starts), np.array(layout.lengths)
    above = _rows_before(layout)
    reader, step = np.nonzero(above >= 0)
    read = above[reader, step]
    order = np.lexsort((reader, read))
    origin, place, copies = np.unique(read[order], return_inverse=True, return_counts=True)
    runs = np.concatenate([[0], np.cumsum(copies + 1)])
    before = np.full_like(above, -1)
    before[reader[order], step[order]] = np.arange(len(order)) + place + 1  # the first of each run is its own segment's
    is_read = np.zeros(len(starts), dtype=bool)
    is_read[[parent for parent in layout.parents if parent >= 0]] = True
    ends = starts + lengths
    tails = ends - np.where(is_read, np.minimum(lengths, warm_up), 0)
    own = np.full_like(above, -1)
    of_origin = np.searchsorted(starts, origin, side="right") - 1
    own[of_origin, origin - tails[of_origin]] = runs[:-1]
    count = -(-lengths // ROWS)
    segment = np.repeat(np.arange(len(starts)), count)
    offset = (np.arange(len(segment)) - np.repeat(np.cumsum(count) - count, count)) * ROWS
    begins, first = (offset == 0)[:, None], starts[segment] + offset
    steps = np.arange(1, most + 1)
    within = np.where(steps <= warm_up, first[:, None] - steps, -1)
    tiles = np.concatenate(
        [
            np.stack([first, np.minimum(ROWS, lengths[segment] - offset), ends[segment], tails[segment]], 1),
            np.where(begins, above[segment], within), np.where(begins, before[segment], -1), own[segment],
        ], 1,
    )  # fmt: skip
    return tiles.astype(np.int32), runs.astype(np.int32), origin.astype(np.int32), int(runs[-1])


def _rows_before(layout: Layout) -> npt.NDArray[np.int64]:
    """[S, WIDEST - 1]: rows 1, 2, ... steps before each segment on its root path, -1 where there are none."""
    warm_up = layout.width - 1
    found = np.full((len(layout.lengths), WIDEST - 1), -1, dtype=np.int64)
    tails: list[list[int]] = []
    for segment, (start, length, parent) in enumerate(zip(layout.starts, layout.lengths, layout.parents, strict=True)):
        above = tails[parent] if parent >= 0 else []
        found[segment, : len(above)] = above[::-1]
        own = range(max(start, start + length - warm_up), start + length)
        tails.append([*above, *own][max(0, len(above) + len(own) - warm_up) :])
    return found


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout, silu: bool, sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    """Outputs [T, size], contiguous, of parts of the channels. x: [T, C]. weight: [C, W]. No graph."""
    x, weight = _rows_whole(x), weight.contiguous()
    outputs = tuple(x.new_empty(x.shape[0], size) for size in sizes)
    for out, of in zip(outputs, _parts(sizes), strict=True):
        _kernels().forward(x[:, of], weight[of], None if bias is None else bias[of], tables(layout).tiles, silu, out)
    return outputs


def backward(
    grads: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layout: Layout,
    silu: bool,
    learned: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, [T, C], and where they are learned of weight and bias. grads: of the outputs, parts of C."""
    x, weight, known = _rows_whole(x), weight.contiguous(), tables(layout)
    of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    slots = torch.empty(known.slots, x.shape[1], dtype=torch.float32, device=x.device)
    sums: list[Tensor] = []
    for grad, of in zip(grads, _parts([grad.shape[1] for grad in grads]), strict=True):
        given = x[:, of], weight[of], None if bias is None else bias[of]
        part = _kernels().backward(_rows_whole(grad), *given, known.tiles, silu, learned, of_x[:, of], slots[:, of])
        if learned:
            sums.append(part.sum(0))
    if known.slots:
        _kernels().add(slots, known.runs, known.origin, of_x)
    if not learned:
        return of_x, None, None
    total, width = torch.cat(sums, 1), weight.shape[1]
    return of_x, total[:width].t().to(weight.dtype), None if bias is None else total[width].to(bias.dtype)


def _parts(sizes: Sequence[int]) -> list[slice]:
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _rows_whole(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _send(table: Tensor, device: torch.device) -> Tensor:
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def _kernels() -> Any:
    return importlib.import_module("prefix_train.forest_conv_triton")
