"""The kernels of `forest_conv`. A thread holds 16 bytes of a row, and a program is one warp.

Four rows are on their way while the four before them are computed: a compiler that is left to itself sinks loads to
where they are used, and waits for each. The window of the last three rows moves on by four rows at a time: no row is
copied from register to register.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BYTES = 512
"""Of a row in one program."""

EACH, NARROW = 32, 64
"""Slots that are added at a time, and channels of a program that adds."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _tap(weight, columns, of_row, some, STEPS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights of the row that is so many steps before."""
    if STEPS < WIDTH:
        found = tl.load(weight + columns * of_row + (WIDTH - 1 - STEPS), mask=some, other=0.0).to(tl.float32)
    else:
        found = tl.zeros(columns.shape, tl.float32)
    return found


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _offset(bias, columns, some, BIASED: tl.constexpr):  # type: ignore[no-untyped-def]
    if BIASED:
        found = tl.load(bias + columns, mask=some, other=0.0).to(tl.float32)
    else:
        found = tl.zeros(columns.shape, tl.float32)
    return found


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _read(at, row, of_row, some, real):  # type: ignore[no-untyped-def]
    return tl.load(at + row * of_row, mask=some & real, other=0.0)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _read_four(at, row, of_row, some, limit):  # type: ignore[no-untyped-def]
    """Rows from `row` on, as far as they are below the limit."""
    a, b = _read(at, row, of_row, some, row < limit), _read(at, row + 1, of_row, some, row + 1 < limit)
    c, d = _read(at, row + 2, of_row, some, row + 2 < limit), _read(at, row + 3, of_row, some, row + 3 < limit)
    return a, b, c, d


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _read_before(x, entry, of_row, some, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row so many steps before a tile."""
    row = tl.load(entry + 3 + STEPS).to(tl.int64)
    return _read(x, row, of_row, some, row >= 0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _product(third, second, first, here, tap3, tap2, tap1, tap0, offset):  # type: ignore[no-untyped-def]
    return here * tap0 + (first * tap1 + (second * tap2 + (third * tap3 + offset)))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sigmoid(x):  # type: ignore[no-untyped-def]
    # A division looks for ranges that this one never reaches: it takes five times the instructions.
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _write(out, row, of_row, some, real, product, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    if SILU:
        product = product * _sigmoid(product)
    tl.store(out + row * of_row, product.to(out.dtype.element_ty), mask=some & real)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _forward_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, out, tiles, x_row, weight_row, out_row, size, blocks,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr, ENTRY: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    entry = tiles + (tl.program_id(0) // blocks) * ENTRY
    columns = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    some = columns < size
    start, count = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    tap0, tap1 = _tap(weight, columns, weight_row, some, 0, WIDTH), _tap(weight, columns, weight_row, some, 1, WIDTH)
    tap2, tap3 = _tap(weight, columns, weight_row, some, 2, WIDTH), _tap(weight, columns, weight_row, some, 3, WIDTH)
    offset = _offset(bias, columns, some, BIASED)
    x, out = x + columns, out + columns
    first, second = _read_before(x, entry, x_row, some, 1), _read_before(x, entry, x_row, some, 2)
    third = _read_before(x, entry, x_row, some, 3)
    next_a, next_b, next_c, next_d = _read_four(x, start, x_row, some, start + count)
    for step in range(0, count, 4):
        row = start + step
        a, b, c, d = next_a.to(tl.float32), next_b.to(tl.float32), next_c.to(tl.float32), next_d.to(tl.float32)
        next_a, next_b, next_c, next_d = _read_four(x, row + 4, x_row, some, start + count)
        found = _product(third, second, first, a, tap3, tap2, tap1, tap0, offset)
        _write(out, row, out_row, some, step < count, found, SILU)
        found = _product(second, first, a, b, tap3, tap2, tap1, tap0, offset)
        _write(out, row + 1, out_row, some, step + 1 < count, found, SILU)
        found = _product(first, a, b, c, tap3, tap2, tap1, tap0, offset)
        _write(out, row + 2, out_row, some, step + 2 < count, found, SILU)
        found = _product(a, b, c, d, tap3, tap2, tap1, tap0, offset)
        _write(out, row + 3, out_row, some, step + 3 < count, found, SILU)
        third, second, first = b, c, d


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _through(grad, product, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradient of what the activation was given."""
    if SILU:
        share = _sigmoid(product)
        grad = grad * (share + product * share * (1.0 - share))
    return grad


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _give(  # type: ignore[no-untyped-def]
    value, place, entry, start, count, tail, of_x, x_row, slots, slot_row, columns, some
):
    """Put a gradient where it belongs: to a row of the tile, or among the slots if others read that row, too."""
    row = start + place
    inside = (place >= 0) & (place < count)
    tl.store(of_x + row * x_row, value.to(of_x.dtype.element_ty), mask=some & inside & (row < tail))
    shared = (place < 0) | (inside & (row >= tail))
    number = tl.where(place < 0, 6 - place, 10 + (row - tail).to(tl.int32))
    slot = tl.load(entry + number, mask=shared, other=-1).to(tl.int64)
    if slot >= 0:
        tl.store(slots + slot * slot_row + columns, value, mask=some)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _backward_kernel(  # type: ignore[no-untyped-def]
    grad, x, weight, bias, of_x, slots, sums, tiles, grad_row, x_row, weight_row, of_x_row, slot_row, size, blocks,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, SILU: tl.constexpr, LEARNED: tl.constexpr, ENTRY: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Step by step a row's product, its gradient, and with it all that the row three steps before is due."""
    tile = tl.program_id(0) // blocks
    entry = tiles + tile * ENTRY
    columns = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    some = columns < size
    start, count = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    end, tail = tl.load(entry + 2), tl.load(entry + 3)
    tap0, tap1 = _tap(weight, columns, weight_row, some, 0, WIDTH), _tap(weight, columns, weight_row, some, 1, WIDTH)
    tap2, tap3 = _tap(weight, columns, weight_row, some, 2, WIDTH), _tap(weight, columns, weight_row, some, 3, WIDTH)
    offset = _offset(bias, columns, some, BIASED)
    x, grad, of_x = x + columns, grad + columns, of_x + columns
    first, second = _read_before(x, entry, x_row, some, 1), _read_before(x, entry, x_row, some, 2)
    third = _read_before(x, entry, x_row, some, 3)
    none = tl.zeros([COLUMNS], tl.float32)
    due1, due2, due3 = none, none, none
    sum0, sum1, sum2, sum3, sum_offset = none, none, none, none, none
    limit = tl.minimum(end, tl.load(entry) + count + 3)
    next_a, next_b, next_c, next_d = _read_four(x, start, x_row, some, limit)
    next_p, next_q, next_r, next_s = _read_four(grad, start, grad_row, some, limit)
    for step in range(0, count + 3, 4):
        row = start + step
        a, b, c, d = next_a.to(tl.float32), next_b.to(tl.float32), next_c.to(tl.float32), next_d.to(tl.float32)
        p, q, r, s = next_p.to(tl.float32), next_q.to(tl.float32), next_r.to(tl.float32), next_s.to(tl.float32)
        next_a, next_b, next_c, next_d = _read_four(x, row + 4, x_row, some, limit)
        next_p, next_q, next_r, next_s = _read_four(grad, row + 4, grad_row, some, limit)
        p = _through(p, _product(third, second, first, a, tap3, tap2, tap1, tap0, offset), SILU)
        found = _product(due3, due2, due1, p, tap0, tap1, tap2, tap3, none)
        _give(found, step - 3, entry, start, count, tail, of_x, of_x_row, slots, slot_row, columns, some)
        q = _through(q, _product(second, first, a, b, tap3, tap2, tap1, tap0, offset), SILU)
        found = _product(due2, due1, p, q, tap0, tap1, tap2, tap3, none)
        _give(found, step - 2, entry, start, count, tail, of_x, of_x_row, slots, slot_row, columns, some)
        r = _through(r, _product(first, a, b, c, tap3, tap2, tap1, tap0, offset), SILU)
        found = _product(due1, p, q, r, tap0, tap1, tap2, tap3, none)
        _give(found, step - 1, entry, start, count, tail, of_x, of_x_row, slots, slot_row, columns, some)
        s = _through(s, _product(a, b, c, d, tap3, tap2, tap1, tap0, offset), SILU)
        found = _product(p, q, r, s, tap0, tap1, tap2, tap3, none)
        _give(found, step, entry, start, count, tail, of_x, of_x_row, slots, slot_row, columns, some)
        due3, due2, due1 = q, r, s
        if LEARNED:
            p, q = tl.where(step < count, p, 0.0), tl.where(step + 1 < count, q, 0.0)
            r, s = tl.where(step + 2 < count, r, 0.0), tl.where(step + 3 < count, s, 0.0)
            sum0 += p * a + q * b + r * c + s * d
            sum1 += p * first + q * a + r * b + s * c
            sum2 += p * second + q * first + r * a + s * b
            sum3 += p * third + q * second + r * first + s * a
            sum_offset += p + q + r + s
        third, second, first = b, c, d
    if LEARNED:
        sums = sums + tile.to(tl.int64) * (WIDTH + 1) * size + columns
        tl.store(sums + (WIDTH - 1) * size, sum0, mask=some)
        if WIDTH > 1:
            tl.store(sums + (WIDTH - 2) * size, sum1, mask=some)
        if WIDTH > 2:
            tl.store(sums + (WIDTH - 3) * size, sum2, mask=some)
        if WIDTH > 3:
            tl.store(sums + (WIDTH - 4) * size, sum3, mask=some)
        tl.store(sums + WIDTH * size, sum_offset, mask=some)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_kernel(  # type: ignore[no-untyped-def]
    slots, runs, origin, of_x, slot_row, of_x_row, size, blocks, EACH: tl.constexpr, COLUMNS: tl.constexpr
):
    number = tl.program_id(0) // blocks
    columns = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    some = columns < size
    begin, end = tl.load(runs + number), tl.load(runs + number + 1)
    total = tl.zeros([EACH, COLUMNS], tl.float32)
    for first in range(begin, end, EACH):
        slot = first + tl.arange(0, EACH)
        at = slots + slot[:, None].to(tl.int64) * slot_row + columns[None, :]
        total += tl.load(at, mask=(slot < end)[:, None] & some[None, :], other=0.0)
    row = tl.load(origin + number).to(tl.int64)
    tl.store(of_x + row * of_x_row + columns, tl.sum(total, 0).to(of_x.dtype.element_ty), mask=some)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tensor, silu: bool, out: Tensor) -> None:
    """Of one part of the channels. x, out: [T, size]. weight: [size, W]. bias: [size]. tiles: `Tables.tiles`."""
    columns = BYTES // x.element_size()
    blocks = triton.cdiv(x.shape[1], columns)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _forward_kernel[(blocks * len(tiles),)](
            x, weight, bias, out, tiles, x.stride(0), weight.stride(0), out.stride(0), x.shape[1], blocks,
            WIDTH=weight.shape[1], BIASED=bias is not None, SILU=silu, ENTRY=tiles.shape[1], COLUMNS=columns,
            num_warps=1,
        )  # fmt: skip


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiles: Tensor,
    silu: bool,
    learned: bool,
    of_x: Tensor,
    slots: Tensor,
) -> Tensor | None:
    """Of one part of the channels: fills of_x [T, size], but for rows that have slots, and slots [n, size] in float32.

    learned: returns each tile's share of the gradients of weight and bias, [N, W + 1, size] in float32.
    """
    (_, size), width = x.shape, weight.shape[1]
    sums = torch.empty(len(tiles), width + 1, size, dtype=torch.float32, device=x.device) if learned else None
    columns = BYTES // x.element_size()
    blocks = triton.cdiv(size, columns)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _backward_kernel[(blocks * len(tiles),)](
            grad, x, weight, bias, of_x, slots, sums, tiles, grad.stride(0), x.stride(0), weight.stride(0),
            of_x.stride(0), slots.stride(0), size, blocks, WIDTH=width, BIASED=bias is not None, SILU=silu,
            LEARNED=learned, ENTRY=tiles.shape[1], COLUMNS=columns, num_warps=1,
        )  # fmt: skip
    return sums


def add(slots: Tensor, runs: Tensor, origin: Tensor, of_x: Tensor) -> None:
    """Sum of each run of slots, in their order, put into of_x [T, C] at the rows `origin`."""
    blocks = triton.cdiv(of_x.shape[1], NARROW)
    with torch.cuda.device_of(of_x):  # type: ignore[no-untyped-call]
        _add_kernel[(blocks * len(origin),)](
            slots, runs, origin, of_x, slots.stride(0), of_x.stride(0), of_x.shape[1], blocks, EACH=EACH, COLUMNS=NARROW
        )
