"""NF4 to a matrix in one kernel: each byte is read once, each element written once, and there are no temporaries."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BYTES = 2048
"""Of one program."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def nf4_dequantise(packed, scales, codes, out, nbytes, elements, BYTES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    begin = tl.program_id(0).to(tl.int64) * BYTES
    place = begin + tl.arange(0, BYTES)
    byte = tl.load(packed + place, mask=place < nbytes, other=0).to(tl.int32)
    scale = tl.load(scales + place // (BLOCK // 2), mask=place < nbytes, other=0.0)
    first = tl.load(codes + (byte >> 4)) * scale
    second = tl.load(codes + (byte & 15)) * scale
    element = 2 * begin + tl.arange(0, 2 * BYTES)
    tl.store(out + element, tl.interleave(first, second).to(out.dtype.element_ty), mask=element < elements)


def dequantise(packed: Tensor, scales: Tensor, codes: Tensor, out: Tensor, block: int) -> None:
    """Fill `out`, [n] and contiguous, from packed: uint8 [(n + 1) // 2], scales: float32, one for `block` elements,
    and codes: float32 [16]. All on one CUDA device. The arithmetic is float32's, rounded once."""
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        nf4_dequantise[(triton.cdiv(packed.numel(), BYTES),)](
            packed, scales, codes, out, packed.numel(), out.numel(), BYTES, block
        )
