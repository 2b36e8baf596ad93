"""The kernels of `logits`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""Most words of one step."""

WARPS = 8


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _normalisers_kernel(logits, out, of_row, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, words, BLOCK):
        found = tl.load(logits + row * of_row + first + places, mask=first + places < words, other=float("-inf"))
        found = found.to(tl.float32)
        above = tl.maximum(largest, found)
        # Where nothing but -inf was seen, both differences are of -inf and -inf.
        base = tl.where(above == float("-inf"), 0.0, above)
        total = total * tl.exp(largest - base) + tl.exp(found - base)
        largest = above
    whole = tl.max(largest, 0)
    total = tl.sum(total * tl.exp(largest - whole), 0)
    tl.store(out + row, whole + tl.log(total))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits, normaliser, per_row, starts, ids, weights, of_row, words, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * of_row + columns
    found = tl.load(at, mask=columns < words, other=float("-inf")).to(tl.float32)
    gradient = tl.exp(found - tl.load(normaliser + row)) * tl.load(per_row + row)
    for entry in range(tl.load(starts + row), tl.load(starts + row + 1)):
        gradient -= tl.where(columns == tl.load(ids + entry), tl.load(weights + entry), 0.0)
    tl.store(at, gradient.to(logits.dtype.element_ty), mask=columns < words)


def normalisers(logits: Tensor) -> Tensor:
    """See `logits.normalisers`."""
    rows, words = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _normalisers_kernel[(rows,)](logits, out, logits.stride(0), words, BLOCK=_block(words), num_warps=WARPS)
    return out


def to_gradient(
    logits: Tensor, normaliser: Tensor, per_row: Tensor, starts: Tensor, words: Tensor, weights: Tensor
) -> None:
    """See `logits.to_gradient`."""
    rows, width = logits.shape
    block = _block(width)
    with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]
        _gradient_kernel[(rows, triton.cdiv(width, block))](
            logits, normaliser, per_row, starts, words, weights, logits.stride(0), width, BLOCK=block, num_warps=WARPS
        )


def _block(words: int) -> int:
    return min(BLOCK, int(triton.next_power_of_2(words)))
