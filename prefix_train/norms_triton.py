"""The kernels of `norms`. A row is held whole; the gradient of a weight is summed in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = 512
"""Most partial sums of the gradient of a weight."""

ELEMENTS = 2048
"""Of the rows that one step of a gated norm takes."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rows_kernel(  # type: ignore[no-untyped-def]
    hidden, added, weight, total, normed, scales, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    some, at = columns < WIDTH, row * WIDTH + columns
    x = tl.load(hidden + at, mask=some, other=0.0)
    if SUM:
        more = tl.load(added + at, mask=some, other=0.0)
        x = (x.to(tl.float32) + more.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, x, mask=some)
    x = x.to(tl.float32)
    factor = tl.load(weight + columns, mask=some, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    out = x * scale
    if CENTRED:
        factor += 1.0
    else:
        out = out.to(normed.dtype.element_ty).to(tl.float32)
    out *= factor
    tl.store(normed + at, out.to(normed.dtype.element_ty), mask=some)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["count", "steps"])  # type: ignore[untyped-decorator, unused-ignore]
def _rows_backward_kernel(  # type: ignore[no-untyped-def]
    of_total, of_normed, total, weight, scales, into, sums, count, steps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    part, columns = tl.program_id(0), tl.arange(0, BLOCK)
    some = columns < WIDTH
    factor = tl.load(weight + columns, mask=some, other=0.0).to(tl.float32)
    if CENTRED:
        factor += 1.0
    learned = tl.zeros([BLOCK], tl.float32)
    for step in range(steps):
        row = part.to(tl.int64) * steps + step
        at, here = row * WIDTH + columns, some & (row < count)
        scale = tl.load(scales + row, mask=row < count, other=0.0)
        shape = tl.load(total + at, mask=here, other=0.0).to(tl.float32) * scale
        grad = tl.load(of_normed + at, mask=here, other=0.0).to(tl.float32)
        if LEARNS:
            learned += grad * shape
        through = grad * factor
        through = scale * (through - shape * (tl.sum(through * shape, 0) / WIDTH))
        through += tl.load(of_total + at, mask=here, other=0.0).to(tl.float32)
        tl.store(into + at, through.to(into.dtype.element_ty), mask=here)
    if LEARNS:
        tl.store(sums + part.to(tl.int64) * WIDTH + columns, learned, mask=some)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator, unused-ignore]
def _gated_kernel(  # type: ignore[no-untyped-def]
    x, gate, weight, out, count, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    some, at = (rows < count)[:, None] & (columns < WIDTH)[None, :], rows[:, None] * WIDTH + columns[None, :]
    factor = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    found = tl.load(x + at, mask=some, other=0.0).to(tl.float32)
    opens = tl.load(gate + at, mask=some, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(found * found, 1) / WIDTH + eps)
    normed = (found * scale[:, None]).to(x.dtype.element_ty).to(tl.float32) * factor[None, :]
    normed = normed.to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + at, (normed * opens * tl.sigmoid(opens)).to(out.dtype.element_ty), mask=some)


@triton.jit(do_not_specialize=["count", "steps"])  # type: ignore[untyped-decorator, unused-ignore]
def _gated_backward_kernel(  # type: ignore[no-untyped-def]
    grad, x, gate, weight, of_x, of_gate, sums, count, steps, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, LEARNS: tl.constexpr,
):  # fmt: skip
    part, columns = tl.program_id(0), tl.arange(0, BLOCK)
    factor = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    learned = tl.zeros([BLOCK], tl.float32)
    for step in range(steps):
        rows = (part.to(tl.int64) * steps + step) * ROWS + tl.arange(0, ROWS)
        some, at = (rows < count)[:, None] & (columns < WIDTH)[None, :], rows[:, None] * WIDTH + columns[None, :]
        found = tl.load(x + at, mask=some, other=0.0).to(tl.float32)
        opens = tl.load(gate + at, mask=some, other=0.0).to(tl.float32)
        above = tl.load(grad + at, mask=some, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(found * found, 1) / WIDTH + eps)[:, None]
        shape = found * scale
        share = tl.sigmoid(opens)
        normed = shape.to(x.dtype.element_ty).to(tl.float32) * factor[None, :]
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
        slope = share * (1.0 + opens * (1.0 - share))
        tl.store(of_gate + at, (above * normed * slope).to(of_gate.dtype.element_ty), mask=some)
        above *= opens * share
        if LEARNS:
            learned += tl.sum(above * shape, 0)
        above *= factor[None, :]
        above = scale * (above - shape * (tl.sum(above * shape, 1) / WIDTH)[:, None])
        tl.store(of_x + at, above.to(of_x.dtype.element_ty), mask=some)
    if LEARNS:
        tl.store(sums + part.to(tl.int64) * WIDTH + columns, learned, mask=columns < WIDTH)


def rows(
    hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, or `hidden` itself; its norm; and each row's scale, [rows] in float32."""
    width = hidden.shape[-1]
    count = hidden.numel() // width
    normed = torch.empty_like(hidden)
    total = hidden if added is None else torch.empty_like(hidden)
    scales = torch.empty(count, dtype=torch.float32, device=hidden.device)
    with torch.cuda.device_of(hidden):  # type: ignore[no-untyped-call]
        _rows_kernel[(count,)](
            hidden, None if added is None else added.contiguous(), weight, total, normed, scales, eps,
            WIDTH=width, BLOCK=triton.next_power_of_2(width), CENTRED=centred, SUM=added is not None,
            num_warps=_warps(width),
        )  # fmt: skip
    return total, normed, scales


def rows_backward(
    of_total: Tensor, of_normed: Tensor, total: Tensor, weight: Tensor, scales: Tensor, centred: bool, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of what was summed, and of the weight where it learns."""
    width, count = total.shape[-1], len(scales)
    into = torch.empty_like(total)
    steps = triton.cdiv(count, PARTS) if learns else 1
    parts = triton.cdiv(count, steps)
    sums = torch.empty(parts, width, dtype=torch.float32, device=total.device) if learns else None
    with torch.cuda.device_of(total):  # type: ignore[no-untyped-call]
        _rows_backward_kernel[(parts,)](
            of_total, of_normed, total, weight, scales, into, sums, count, steps,
            WIDTH=width, BLOCK=triton.next_power_of_2(width), CENTRED=centred, LEARNS=learns, num_warps=_warps(width),
        )  # fmt: skip
    return into, None if sums is None else sums.sum(0).to(weight.dtype)


def gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """See `norms.gated`; put into `out`."""
    width = x.shape[-1]
    count, (block, each) = x.numel() // width, _of_step(width)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _gated_kernel[(triton.cdiv(count, each),)](
            x, gate, weight, out, count, eps, WIDTH=width, BLOCK=block, ROWS=each, num_warps=4
        )


def gated_backward(
    grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float, of_gate: Tensor, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x, and, in float32, of the weight where it learns; the gate's is put into `of_gate`."""
    width, of_x = x.shape[-1], torch.empty_like(x)
    count, (block, each) = x.numel() // width, _of_step(width)
    steps = triton.cdiv(triton.cdiv(count, each), PARTS) if learns else 1
    parts = triton.cdiv(triton.cdiv(count, each), steps)
    sums = torch.empty(parts, width, dtype=torch.float32, device=x.device) if learns else None
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        _gated_backward_kernel[(parts,)](
            grad, x, gate, weight, of_x, of_gate, sums, count, steps, eps,
            WIDTH=width, BLOCK=block, ROWS=each, LEARNS=learns, num_warps=4,
        )  # fmt: skip
    return of_x, None if sums is None else sums.sum(0)


def _of_step(width: int) -> tuple[int, int]:
    block = triton.next_power_of_2(width)
    return block, max(1, ELEMENTS // block)


def _warps(width: int) -> int:
    # More for 5,120 elements would leave a processor one program whose row it waits for.
    warps: int = triton.next_power_of_2(width) // 1024
    return min(16, max(1, warps))
