"""The kernels of `joined`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefix_train.joined import ROWS, Tables


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _read(entry, batch, head, rows, some, columns, OUT: tl.constexpr, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS, D] of the piece whose address and strides are at `entry`."""
    begin = tl.multiple_of(tl.load(entry).to(tl.pointer_type(OUT)), 16)
    of_batch, of_head = tl.multiple_of(tl.load(entry + 1), ALIGN), tl.multiple_of(tl.load(entry + 2), ALIGN)
    of_row = tl.multiple_of(tl.load(entry + 3), ALIGN)
    at = begin + batch * of_batch + head * of_head
    return tl.load(at + rows[:, None] * of_row + columns[None, :], mask=some, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _read_lse(entry, batch, head, rows, some):  # type: ignore[no-untyped-def]
    begin = tl.load(entry + 4).to(tl.pointer_type(tl.float32))
    at = begin + batch * tl.load(entry + 5) + head * tl.load(entry + 6) + rows * tl.load(entry + 7)
    return tl.load(at, mask=some, other=0.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _join_kernel(  # type: ignore[no-untyped-def]
    pieces, tiles, segments, out, lse, blocks, of_head, of_row, lse_head, size,
    WEIGHED: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    segment, first = tl.load(tiles + 2 * tl.program_id(0)), tl.load(tiles + 2 * tl.program_id(0) + 1)
    mine = segments + 6 * segment
    start, length = tl.load(mine), tl.load(mine + 1)
    rows, columns = first + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    real = rows < length
    some = real[:, None] & (columns < size)[None, :]
    entry, batch = pieces + 8 * tl.load(mine + 2), tl.load(mine + 3)
    total = _read(entry, batch, head, rows, some, columns, out.dtype.element_ty, ALIGN)
    if WEIGHED:
        most = _read_lse(entry, batch, head, rows, real)
        weight = tl.full([ROWS], 1.0, tl.float32)
    node = tl.load(mine + 4)
    for _ in range(DEPTH):  # not a `while`: in one Triton sees no alignment and reads element by element
        here = real & (node >= 0)
        above = segments + 6 * tl.maximum(node, 0)
        entry = pieces + 8 * (blocks + tl.load(above + 5))
        there = start + rows - (tl.load(above) + tl.load(above + 1))
        within = here[:, None] & (columns < size)[None, :]
        part = _read(entry, 0, head, there, within, columns, out.dtype.element_ty, ALIGN)
        if WEIGHED:
            its = tl.where(here, _read_lse(entry, 0, head, there, here), float("-inf"))
            larger = tl.maximum(most, its)
            before, now = tl.exp(most - larger), tl.exp(its - larger)
            total = total * before[:, None] + part * now[:, None]
            weight, most = weight * before + now, larger
        else:
            total += part
        node = tl.where(node >= 0, tl.load(above + 4), -1)
    if WEIGHED:
        total = total / weight[:, None]
        tl.store(lse + head * lse_head + start + rows, most + tl.log(weight), mask=real)
    at = out + head * of_head + (start + rows)[:, None] * of_row + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=some)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _heads_kernel(  # type: ignore[no-untyped-def]
    total, part, tokens, begin, length, tiles, of_head, of_row, from_batch, from_head, from_row, size,
    GROUPS: tl.constexpr, SCATTERED: tl.constexpr, MORE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(1).to(tl.int64), tl.program_id(0)
    batch = (tile // tiles).to(tl.int64)
    rows, columns = (tile % tiles) * ROWS + tl.arange(0, ROWS).to(tl.int64), tl.arange(0, WIDTH)
    real = rows < length
    some = real[:, None] & (columns < size)[None, :]
    at = part + batch * from_batch + rows[:, None] * from_row + columns[None, :]
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    for group in tl.static_range(GROUPS):
        found += tl.load(at + (head * GROUPS + group) * from_head, mask=some, other=0.0).to(tl.float32)
    if SCATTERED:  # noqa: SIM108
        row = tl.load(tokens + batch * length + rows, mask=real, other=0)
    else:
        row = begin + batch * length + rows
    into = total + head * of_head + row[:, None] * of_row + columns[None, :]
    if MORE:
        found += tl.load(into, mask=some, other=0.0)
    tl.store(into, found, mask=some)


def join(addresses: Tensor, blocks: int, tables: Tables, out: Tensor, lse: Tensor | None) -> None:
    """out: [1, H, T, D]. lse: [1, H, T], or None where pieces only add up."""
    size = out.shape[3]
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        _join_kernel[(len(tables.tiles), out.shape[1])](
            addresses, tables.tiles, tables.segments, out, lse, blocks, out.stride(1), out.stride(2),
            0 if lse is None else lse.stride(1), size,
            WEIGHED=lse is not None, DEPTH=tables.depth, ROWS=ROWS, WIDTH=triton.next_power_of_2(size),
            ALIGN=16 // out.element_size(),
        )  # fmt: skip


def add_heads(total: Tensor, part: Tensor, start: int | None, rows: Tensor | None, more: bool) -> None:
    """See `joined.add_heads`."""
    count, heads, length, size = part.shape
    tiles = triton.cdiv(length, ROWS)
    with torch.cuda.device_of(total):  # type: ignore[no-untyped-call]
        _heads_kernel[(tiles * count, total.shape[1])](
            total, part, rows, start or 0, length, tiles, total.stride(1), total.stride(2), *part.stride()[:3], size,
            GROUPS=heads // total.shape[1], SCATTERED=start is None, MORE=more, ROWS=ROWS,
            WIDTH=triton.next_power_of_2(size),
        )  # fmt: skip
