"""NF4, bitsandbytes' 4-bit format for frozen weights, byte for byte, in plain torch.

A weight is flattened row by row. Each 64 consecutive elements share one float32 scale, their largest magnitude; each
element becomes the index of the nearest of 16 codes, two indices to a byte, the first in the high nibble. Double
quantisation stores the scales in 8 bits: their mean is taken off, and each 256 of them share a float32 scale of their
own. Source: bitsandbytes 0.50, `backends/default/ops.py` (quantize_4bit), `csrc/cpu_ops.cpp` (quantize_blockwise).
"""

from __future__ import annotations

from functools import cache
from math import prod

import torch
from torch import Tensor

BLOCK = 64
"""Elements that share a scale."""

BLOCK2 = 256
"""Scales that share a scale, under double quantisation."""

PLACES = 1 << 16
"""Entries of bitsandbytes' table from a value to the index of its 8-bit code."""

CHUNK = 1 << 18
"""Elements that are worked on at once, where nothing else is asked for: what a CPU's cache holds."""

FUSED = True
"""On CUDA, one kernel instead of a chain of operations, which moves six times the bytes; both give the same bits."""

STEP = BLOCK * BLOCK2
"""A chunk is a multiple of this many elements, so that none begins inside a group of scales."""

CODES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""What the 16 indices stand for; index 7 is zero. bitsandbytes' table of quantiles of the normal distribution."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What can be quantised, and what is dequantised to."""

Parts = dict[str, Tensor]
"""packed: uint8 [(n + 1) // 2]. absmax: float32 [scales], or, with double quantisation, uint8 [scales] and with it
absmax2: float32 [ceil(scales / 256)], code2: float32 [256], offset: float32 []."""


def part_shapes(shape: tuple[int, ...], double: bool) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each part of a quantised tensor of this shape, in the order in which they are stored."""
    elements = prod(shape)
    scales = -(-elements // BLOCK)
    packed: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"packed": (torch.uint8, ((elements + 1) // 2,))}
    if not double:
        return packed | {"absmax": (torch.float32, (scales,))}
    return packed | {
        "absmax": (torch.uint8, (scales,)),
        "absmax2": (torch.float32, (-(-scales // BLOCK2),)),
        "code2": (torch.float32, (256,)),
        "offset": (torch.float32, ()),
    }


def quantise(weight: Tensor, double: bool = False) -> Parts:
    """The parts of `weight`, of any shape, on the CPU, in one of DTYPES. ValueError for what is not finite."""
    if weight.dtype not in DTYPES:
        raise ValueError(f"{weight.dtype} cannot be quantised to NF4; give float32, bfloat16 or float16")
    flat = weight.detach().reshape(-1)
    packed = torch.empty((flat.numel() + 1) // 2, dtype=torch.uint8)
    absmax = torch.empty(-(-flat.numel() // BLOCK), dtype=torch.float32)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK].float()
        if not bool(torch.isfinite(part).all()):
            raise ValueError("it holds values that are not finite")
        _quantise_chunk(part, packed[start // 2 :], absmax[start // BLOCK :])
    if not double:
        return {"packed": packed, "absmax": absmax}
    return {"packed": packed} | _quantise_scales(absmax)


def dequantise(parts: Parts, out: Tensor, chunk: int = CHUNK) -> Tensor:
    """Fill `out`, contiguous and on the parts' device, and return it.

    The arithmetic is float32's, rounded once to `out`'s dtype. Temporaries hold `chunk` elements, 6 bytes for each; on
    CUDA one kernel does it without.
    """
    if chunk < 1 or chunk % STEP:
        raise ValueError(f"chunk is {chunk}: a multiple of {STEP} is expected")
    flat, packed = out.view(-1), parts["packed"]
    if packed.is_cuda and FUSED:
        from prefix_train.stream import nf4_triton

        scales = _scales(parts, 0, -(-flat.numel() // BLOCK))
        nf4_triton.dequantise(packed, scales, _codes(packed.device), flat, BLOCK)
        return out
    pairs = _pairs(packed.device)
    scratch = torch.empty((min(chunk, flat.numel()) + 1) // 2, dtype=pairs.dtype, device=packed.device)
    for start in range(0, flat.numel(), chunk):
        stop = min(start + chunk, flat.numel())
        whole = start + (stop - start) // BLOCK * BLOCK
        index = packed[start // 2 : (stop + 1) // 2].int()  # int32: torch would take uint8 for a mask
        codes = torch.index_select(pairs, 0, index, out=scratch[: index.numel()]).view(torch.float32)
        scales = _scales(parts, start // BLOCK, -(-stop // BLOCK))
        rows = codes[: whole - start].view(-1, BLOCK)
        torch.mul(rows, scales[: rows.shape[0], None], out=flat[start:whole].view(-1, BLOCK))
        if whole < stop:
            torch.mul(codes[whole - start : stop - start], scales[-1], out=flat[whole:stop])
    return out


def _scales(parts: Parts, start: int, stop: int) -> Tensor:
    """Scales `start` to `stop` in float32; `start` is a multiple of BLOCK2."""
    absmax = parts["absmax"][start:stop]
    if "absmax2" not in parts:
        return absmax
    second = parts["absmax2"][start // BLOCK2 : -(-stop // BLOCK2)].repeat_interleave(BLOCK2)[: stop - start]
    return torch.index_select(parts["code2"], 0, absmax.int()).mul_(second).add_(parts["offset"])


def _quantise_chunk(flat: Tensor, packed: Tensor, absmax: Tensor) -> None:
    """Write codes and scales of one chunk of float32 to the beginning of `packed` and `absmax`."""
    whole = flat.numel() // BLOCK * BLOCK
    scaled = torch.zeros(flat.numel() + flat.numel() % 2, dtype=torch.float32)
    rows = flat[:whole].view(-1, BLOCK)
    scale = rows.abs().amax(dim=-1)
    absmax[: whole // BLOCK] = scale
    scaled[:whole] = (rows * (1.0 / scale.clamp(min=1e-38)).view(-1, 1)).clamp_(-1, 1).view(-1)
    if whole < flat.numel():
        # bitsandbytes' own arithmetic for what is left over: it divides, and the scale itself is never below 1e-38
        last = flat[whole:].abs().amax().clamp(min=1e-38)
        absmax[whole // BLOCK] = last
        scaled[whole : flat.numel()] = (flat[whole:] / last).clamp_(-1, 1)
    index = _nearest(scaled).view(torch.int16)  # two elements, the first in the low byte
    packed[: index.numel()] = ((index << 4) | (index >> 8)).to(torch.uint8)


def _nearest(values: Tensor) -> Tensor:
    """uint8: index of the code nearest to each of `values`, float32 from -1 to 1; of two as near the lower one.

    What `torch.bucketize` finds between the codes' midpoints, ten times as fast: the upper half of a float's bits says
    which midpoint alone is in question, since no two midpoints share one.
    """
    found = torch.index_select(_halves(), 0, (values.view(torch.int32) >> 16).add_(1 << 15)).view(torch.float32)
    index, midpoint = found.view(-1, 2).unbind(1)
    return index.to(torch.uint8).add_(values > midpoint)


@cache
def _halves() -> Tensor:
    """int64 [65536], two float32 each, by a float's upper 16 bits (signed, from the lowest on): how many midpoints lie
    below all floats that begin so, and the next midpoint."""
    codes = torch.tensor(CODES)
    midpoints = (codes[:-1] + codes[1:]) / 2
    first = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    ends = torch.stack([first.view(torch.float32), (first | 0xFFFF).view(torch.float32)]).nan_to_num()
    below = torch.bucketize(ends.amin(dim=0), midpoints)
    following = torch.cat([midpoints, torch.tensor([torch.inf])])[below]
    return torch.stack([below.float(), following], dim=1).view(torch.int64).view(-1)


def _quantise_scales(absmax: Tensor) -> Parts:
    """Double quantisation of the scales of a whole tensor."""
    offset = _mean(absmax)
    centred = torch.nn.functional.pad(absmax - offset, (0, -absmax.numel() % BLOCK2)).view(-1, BLOCK2)
    second = centred.abs().amax(dim=-1)
    # bitsandbytes looks the nearest code up in a table of 65,536 values; scales that are all zero get index 0
    value = (centred * (1.0 / second)[:, None]).clamp_(-1, 1)
    place = ((value + 1.0) * 0.5 * (PLACES - 1) + 0.5).nan_to_num_(0.0).int()
    index = _places()[place].masked_fill_((second == 0)[:, None], 0)
    return {"absmax": index.view(-1)[: absmax.numel()].clone(), "absmax2": second, "code2": codes8(), "offset": offset}


def _mean(values: Tensor) -> Tensor:
    """The mean as one thread computes it: a sum over several depends on their number in the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return values.mean()
    finally:
        torch.set_num_threads(threads)


def codes8() -> Tensor:
    """float32 [256], ascending: bitsandbytes' signed dynamic 8-bit codes (`create_dynamic_map`).

    Seven decades, each with twice as many equally spaced values as the one below, and zero and one.
    """
    magnitudes: list[float] = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        magnitudes += (10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
    return torch.tensor(sorted([*magnitudes, *(-value for value in magnitudes), 0.0, 1.0]), dtype=torch.float32)


@cache
def _places() -> Tensor:
    """uint8 [65536]: the index of the code nearest to each of as many values from -1 to 1."""
    codes = codes8()
    values = -1.0 + (2.0 * torch.arange(PLACES, dtype=torch.float32)) / (PLACES - 1)
    return torch.bucketize(values, 0.5 * (codes[:-1] + codes[1:])).to(torch.uint8)


@cache
def _codes(device: torch.device) -> Tensor:
    """float32 [16]."""
    return torch.tensor(CODES, dtype=torch.float32, device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """int64 [256]: the two codes of every byte, two float32 each. One gather of 8 bytes beats two of 4, and many times
    one of a row."""
    codes = torch.tensor(CODES, dtype=torch.float32)
    return torch.stack([codes.repeat_interleave(16), codes.repeat(16)], dim=1).view(torch.int64).view(-1).to(device)
