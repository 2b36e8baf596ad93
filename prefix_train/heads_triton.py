"""The kernels of `heads`: each element is read from memory once and written once.

A program takes some tokens, one head after the other. What an element is rotated with, its partner, half of the rotated
ones away, is read a second time, out of the cache. Numbers are float32 within; `_rounded` stands where the model's own
operations write a tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefix_train.heads import NORMS, Norm

ELEMENTS = 2048
"""Of one head of one program's tokens: each of its threads has 16."""

ROUNDING = {"enable_fp_fusion": False}
"""A product that is rounded before it is added stays so: else both become one operation of 16 bits that rounds once."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rounded(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    return x.to(KIND).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _partner(columns, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the first HALF columns the next HALF, of these the first; those that are not rotated are their own."""
    block = columns // HALF
    return tl.where(block < 2, 1 - block, block) * HALF + columns % HALF


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _normed(x, scale, weight, NORM: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """NORM 1: scaled by 1 + weight and rounded once. 2: rounded before it is scaled by the weight, and after."""
    normed = x * scale[:, None]
    if NORM == 1:
        return _rounded(normed * (1.0 + weight)[None, :], KIND)
    return _rounded(_rounded(normed, KIND) * weight[None, :], KIND)


@triton.jit(do_not_specialize=["count", "heads"])  # type: ignore[untyped-decorator, unused-ignore]
def _rotate_kernel(  # type: ignore[no-untyped-def]
    x, weight, cos, sin, out, count, heads, of_row, of_head, out_row, out_head, cos_row, sin_row, eps,
    NORM: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = out.dtype.element_ty
    of_head = tl.cast(of_head, tl.int64)
    out_head = tl.cast(out_head, tl.int64)
    rows, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    partner, turned = _partner(columns, HALF), columns < 2 * HALF
    real = (rows < count)[:, None]
    some, rotated = real & (columns < SIZE)[None, :], real & turned[None, :]
    cosine = tl.load(cos + rows[:, None] * cos_row + columns[None, :], mask=rotated, other=1.0).to(tl.float32)
    sine = tl.load(sin + rows[:, None] * sin_row + columns[None, :], mask=rotated, other=0.0).to(tl.float32)
    sine = tl.where(columns < HALF, -1.0, 1.0)[None, :] * sine
    if NORM > 0:
        mine = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
        its = tl.load(weight + partner, mask=turned, other=0.0).to(tl.float32)
    for head in range(heads):
        at = x + rows[:, None] * of_row + head * of_head
        found = tl.load(at + columns[None, :], mask=some, other=0.0).to(tl.float32)
        other = tl.load(at + partner[None, :], mask=rotated, other=0.0).to(tl.float32)
        if NORM > 0:
            scale = tl.rsqrt(tl.sum(found * found, 1) / SIZE + eps)
            found = _normed(found, scale, mine, NORM, KIND)
            other = _normed(other, scale, its, NORM, KIND)
        found = _rounded(found * cosine, KIND) + _rounded(other * sine, KIND)
        tl.store(out + rows[:, None] * out_row + head * out_head + columns[None, :], found.to(KIND), mask=some)


@triton.jit(do_not_specialize=["count", "heads"])  # type: ignore[untyped-decorator, unused-ignore]
def _rotate_back_kernel(  # type: ignore[no-untyped-def]
    grad, x, weight, cos, sin, into, sums, count, heads, grad_row, grad_head, of_row, of_head, into_row, into_head,
    cos_row, sin_row, eps,
    NORM: tl.constexpr, LEARNED: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = into.dtype.element_ty
    grad_head = tl.cast(grad_head, tl.int64)
    of_head = tl.cast(of_head, tl.int64)
    into_head = tl.cast(into_head, tl.int64)
    rows, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    partner, turned = _partner(columns, HALF), columns < 2 * HALF
    real = (rows < count)[:, None]
    some, rotated = real & (columns < SIZE)[None, :], real & turned[None, :]
    cosine = tl.load(cos + rows[:, None] * cos_row + columns[None, :], mask=rotated, other=1.0).to(tl.float32)
    sine = tl.load(sin + rows[:, None] * sin_row + partner[None, :], mask=rotated, other=0.0).to(tl.float32)
    sine = tl.where(columns < HALF, 1.0, -1.0)[None, :] * sine
    if NORM > 0:
        mine = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    if LEARNED:
        total = tl.zeros([ROWS, WIDTH], tl.float32)
    for head in range(heads):
        at = grad + rows[:, None] * grad_row + head * grad_head
        found = tl.load(at + columns[None, :], mask=some, other=0.0).to(tl.float32)
        other = tl.load(at + partner[None, :], mask=rotated, other=0.0).to(tl.float32)
        found = _rounded(_rounded(found * cosine, KIND) + _rounded(other * sine, KIND), KIND)
        if NORM > 0:
            at = x + rows[:, None] * of_row + head * of_head
            given = tl.load(at + columns[None, :], mask=some, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(given * given, 1) / SIZE + eps)
            normed = given * scale[:, None]
            if LEARNED:
                total += found * (normed if NORM == 1 else _rounded(normed, KIND))
            found = found * (1.0 + mine)[None, :] if NORM == 1 else _rounded(found * mine[None, :], KIND)
            found = (found - normed * (tl.sum(found * normed, 1) / SIZE)[:, None]) * scale[:, None]
            tl.debug_barrier()  # what is written may be what was read, by several threads
        tl.store(into + rows[:, None] * into_row + head * into_head + columns[None, :], found.to(KIND), mask=some)
    if LEARNED:
        tl.store(sums + tl.program_id(0) * SIZE + columns, tl.sum(total, 0), mask=columns < SIZE)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _opened(gate, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    return _rounded(1.0 / (1.0 + tl.exp(-gate)), KIND)


@triton.jit(do_not_specialize=["count", "heads"])  # type: ignore[untyped-decorator, unused-ignore]
def _gate_kernel(  # type: ignore[no-untyped-def]
    x, gate, out, count, heads, of_row, of_head, gate_row, gate_head,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = out.dtype.element_ty
    of_head = tl.cast(of_head, tl.int64)
    gate_head = tl.cast(gate_head, tl.int64)
    tile, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows, columns = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    some = (rows < count)[:, None] & (columns < SIZE)[None, :]
    found = tl.load(x + rows[:, None] * of_row + head * of_head + columns[None, :], mask=some, other=0.0)
    opened = tl.load(gate + rows[:, None] * gate_row + head * gate_head + columns[None, :], mask=some, other=0.0)
    found = found.to(tl.float32) * _opened(opened.to(tl.float32), KIND)
    at = out + rows[:, None] * (heads * SIZE) + head * SIZE + columns[None, :]
    tl.store(at, found.to(KIND), mask=some)


@triton.jit(do_not_specialize=["count", "heads"])  # type: ignore[untyped-decorator, unused-ignore]
def _gate_back_kernel(  # type: ignore[no-untyped-def]
    grad, x, gate, into, count, heads, grad_row, of_row, of_head, gate_row, gate_head,
    SIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    KIND: tl.constexpr = into.dtype.element_ty
    of_head = tl.cast(of_head, tl.int64)
    gate_head = tl.cast(gate_head, tl.int64)
    tile, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    rows, columns = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    some = (rows < count)[:, None] & (columns < SIZE)[None, :]
    given = tl.load(grad + rows[:, None] * grad_row + head * SIZE + columns[None, :], mask=some, other=0.0)
    found = tl.load(x + rows[:, None] * of_row + head * of_head + columns[None, :], mask=some, other=0.0)
    place = gate + rows[:, None] * gate_row + head * gate_head + columns[None, :]
    opened = _opened(tl.load(place, mask=some, other=0.0).to(tl.float32), KIND)
    given = given.to(tl.float32)
    of_gate = _rounded(given * found.to(tl.float32), KIND) * (1.0 - opened) * opened
    tl.debug_barrier()  # several threads may have read it
    at = into + rows[:, None] * (heads * SIZE) + head * SIZE + columns[None, :]
    tl.store(at, (given * opened).to(KIND), mask=some)
    tl.store(place, of_gate.to(KIND), mask=some)


def rotate(x: Tensor, norm: Norm | None, cos: Tensor, sin: Tensor) -> Tensor:
    """See `heads.rotated`. Each head's tokens lie together: cuDNN reads them faster so (1.3% of its time)."""
    count, heads, size = x.shape
    out, rows = x.new_empty(heads, count, size).transpose(0, 1), rows_for(size)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _rotate_kernel[(triton.cdiv(count, rows),)](
            x, None if norm is None else norm.weight, cos, sin, out, count, heads, *x.stride()[:2], *out.stride()[:2],
            cos.stride(0), sin.stride(0), 0.0 if norm is None else norm.eps,
            NORM=_kind(norm), HALF=cos.shape[1] // 2, **_sizes(size), **ROUNDING,
        )  # fmt: skip
    return out


def rotate_back(
    grad: Tensor, x: Tensor | None, norm: Norm | None, cos: Tensor, sin: Tensor, into: Tensor, learned: bool
) -> Tensor | None:
    """Gradient of x into `into`, which may be x; that of the norm's weight, [D] in float32, where it is `learned`.

    grad, x, into: [T, H, D]. Partial sums are added in a fixed order.
    """
    count, heads, size = into.shape
    programs = triton.cdiv(count, rows_for(size))
    sums = torch.empty(programs, size, dtype=torch.float32, device=into.device) if learned else None
    with torch.cuda.device_of(into):  # type: ignore[no-untyped-call]
        _rotate_back_kernel[(programs,)](
            grad, x, None if norm is None else norm.weight, cos, sin, into, sums, count, heads, *grad.stride()[:2],
            *((0, 0) if x is None else x.stride()[:2]), *into.stride()[:2], cos.stride(0), sin.stride(0),
            0.0 if norm is None else norm.eps,
            NORM=_kind(norm), LEARNED=learned, HALF=cos.shape[1] // 2, **_sizes(size), **ROUNDING,
        )  # fmt: skip
    return None if sums is None else sums.sum(0)


def gate(x: Tensor, gate: Tensor) -> Tensor:
    """See `heads.gated`."""
    count, heads, size = x.shape
    out = x.new_empty(count, heads * size)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _gate_kernel[(triton.cdiv(count, rows_for(size)) * heads,)](
            x, gate, out, count, heads, *x.stride()[:2], *gate.stride()[:2], **_sizes(size), **ROUNDING
        )
    return out


def gate_back(grad: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """Gradient of x; that of the gate is written over it. grad: [T, H * D]. x, gate: [T, H, D]."""
    count, heads, size = x.shape
    into = x.new_empty(count, heads, size)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _gate_back_kernel[(triton.cdiv(count, rows_for(size)) * heads,)](
            grad,
            x,
            gate,
            into,
            count,
            heads,
            grad.stride(0),
            *x.stride()[:2],
            *gate.stride()[:2],
            **_sizes(size),
            **ROUNDING,
        )
    return into


def rows_for(size: int) -> int:
    """Tokens of one program, for heads of `size`."""
    return max(1, ELEMENTS // int(triton.next_power_of_2(size)))


def _sizes(size: int) -> dict[str, int]:
    return {"SIZE": size, "ROWS": rows_for(size), "WIDTH": triton.next_power_of_2(size)}


def _kind(norm: Norm | None) -> int:
    return 0 if norm is None else NORMS.index(norm.kind) + 1
