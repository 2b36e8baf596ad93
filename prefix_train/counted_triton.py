"""The kernels of `counted`: an adapter's products, its masks drawn in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefix_train.counted import EACH, ROUNDS, Draw

ROWS, COLUMNS, PARTS = 64, 128, 64
"""Of one step; most partial sums of the gradient of a factor."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _keep(  # type: ignore[no-untyped-def]
    seed, rows, column, least, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROUNDS: tl.constexpr, EACH: tl.constexpr
):
    """bool [ROWS, COLUMNS] of columns from `column` on, a multiple of EACH."""
    group = column // EACH + tl.arange(0, COLUMNS // EACH)
    none = tl.zeros([ROWS, COLUMNS // EACH], tl.uint32)
    first = none + group[None, :].to(tl.uint32)
    second = none + rows[:, None].to(tl.uint32)
    a, b, c, d = tl.philox(seed, first, second, none, none, ROUNDS)
    even = tl.join(tl.join(a & 0xFFFF, c & 0xFFFF), tl.join(b & 0xFFFF, d & 0xFFFF))
    odd = tl.join(tl.join(a >> 16, c >> 16), tl.join(b >> 16, d >> 16))
    return tl.reshape(tl.join(even, odd), [ROWS, COLUMNS]) >= least.to(tl.uint32)


@triton.jit(do_not_specialize=["seed", "first_row", "least"])  # type: ignore[untyped-decorator, unused-ignore]
def _down_kernel(  # type: ignore[no-untyped-def]
    x, a, out, seed, first_row, least, count, rank, of_row,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, ROUNDS: tl.constexpr,
    EACH: tl.constexpr, EXACT: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    key = tl.load(seed) if HELD else seed
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ranks, places = tl.arange(0, RANK), tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, RANK], tl.float32)
    for column in range(0, WIDTH, COLUMNS):
        columns = column + places
        some = (rows < count)[:, None] & (columns < WIDTH)[None, :]
        found = tl.load(x + rows[:, None] * of_row + columns[None, :], mask=some, other=0.0)
        stays = _keep(key, first_row + rows, column, least, ROWS, COLUMNS, ROUNDS, EACH)
        found = tl.where(stays, found, 0.0).to(x.dtype.element_ty)
        factor = tl.load(
            a + ranks[None, :] * WIDTH + columns[:, None],
            mask=(ranks < rank)[None, :] & (columns < WIDTH)[:, None], other=0.0,
        )  # fmt: skip
        total = tl.dot(found, factor, total, input_precision="ieee" if EXACT else "tf32")
    at = out + rows[:, None] * rank + ranks[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(rows < count)[:, None] & (ranks < rank)[None, :])


@triton.jit(do_not_specialize=["seed", "first_row", "least"])  # type: ignore[untyped-decorator, unused-ignore]
def _back_kernel(  # type: ignore[no-untyped-def]
    up, x, a, into, sums, seed, first_row, least, count, rank, of_row, into_row,
    WIDTH: tl.constexpr, STEPS: tl.constexpr, PUT: tl.constexpr, MORE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, RANK: tl.constexpr, ROUNDS: tl.constexpr, EACH: tl.constexpr, EXACT: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    key = tl.load(seed) if HELD else seed
    column, part = tl.program_id(0) * COLUMNS, tl.program_id(1)
    columns, ranks = column + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    of_factor = (ranks < rank)[:, None] & (columns < WIDTH)[None, :]
    factor = tl.load(a + ranks[:, None] * WIDTH + columns[None, :], mask=of_factor, other=0.0)
    total = tl.zeros([RANK, COLUMNS], tl.float32)
    for step in range(STEPS):
        rows = (part.to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        some = (rows < count)[:, None] & (columns < WIDTH)[None, :]
        found = tl.load(x + rows[:, None] * of_row + columns[None, :], mask=some, other=0.0)
        stays = _keep(key, first_row + rows, column, least, ROWS, COLUMNS, ROUNDS, EACH)
        found = tl.where(stays, found, 0.0).to(x.dtype.element_ty)
        grad = tl.load(
            up + rows[:, None] * rank + ranks[None, :],
            mask=(rows < count)[:, None] & (ranks < rank)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(tl.trans(grad), found, total, input_precision="ieee" if EXACT else "tf32")
        if PUT:
            at = into + rows[:, None] * into_row + columns[None, :]
            through = tl.where(stays, tl.dot(grad, factor, input_precision="ieee" if EXACT else "tf32"), 0.0)
            if MORE:
                through += tl.load(at, mask=some, other=0.0).to(tl.float32)
            tl.store(at, through.to(into.dtype.element_ty), mask=some)
    at = sums + (part * rank + ranks)[:, None].to(tl.int64) * WIDTH + columns[None, :]
    tl.store(at, total, mask=of_factor)


def down(x: Tensor, a: Tensor, draw: Draw) -> Tensor:
    """See `counted.down`."""
    (count, width), rank = x.shape, len(a)
    out = x.new_empty(count, rank)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _down_kernel[(triton.cdiv(count, ROWS),)](
            x, a, out, *draw, count, rank, x.stride(0), WIDTH=width, **_constants(rank, x, draw)
        )
    return out


def back(up: Tensor, x: Tensor, a: Tensor, draw: Draw, into: Tensor | None, more: bool) -> Tensor:
    """See `counted.back`. Partial sums are added in a fixed order."""
    (count, width), rank = x.shape, len(a)
    steps = triton.cdiv(triton.cdiv(count, ROWS), PARTS)
    parts = triton.cdiv(triton.cdiv(count, ROWS), steps)
    sums = torch.empty(parts, rank, width, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _back_kernel[(triton.cdiv(width, COLUMNS), parts)](
            up.contiguous(), x, a, into, sums, *draw, count, rank, x.stride(0), 0 if into is None else into.stride(0),
            WIDTH=width, STEPS=steps, PUT=into is not None, MORE=more, **_constants(rank, x, draw),
        )  # fmt: skip
    return sums.sum(0)


def _constants(rank: int, x: Tensor, draw: Draw) -> dict[str, int]:
    # A product takes at least 16 of each side.
    wide = max(16, triton.next_power_of_2(rank))
    return {"ROWS": ROWS, "COLUMNS": COLUMNS, "RANK": wide, "ROUNDS": ROUNDS, "EACH": EACH,
            "EXACT": x.dtype == torch.float32, "HELD": isinstance(draw.seed, Tensor)}  # fmt: skip
