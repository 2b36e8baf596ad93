"""The kernel that dequantises gives the bits of the chain of operations. To bfloat16 the interpreter cuts off instead
of rounding; that dtype is for a GPU's test."""

from __future__ import annotations

import pytest
import torch

from prefix_train.stream import nf4, nf4_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("elements", [1, 63, 64, 65, 4096, 4097, 64 * 256 + 77])
def test_gives_the_bits_of_many_operations(elements: int, double: bool, dtype: torch.dtype) -> None:
    weight = (torch.randn(elements, generator=torch.Generator().manual_seed(elements)) * 0.05).to(dtype)
    parts = nf4.quantise(weight, double)
    right = nf4.dequantise(parts, torch.empty_like(weight))
    scales = nf4._scales(parts, 0, -(-elements // nf4.BLOCK))
    found = torch.full_like(weight, float("nan"))
    nf4_triton.dequantise(parts["packed"], scales, nf4._codes(weight.device), found, nf4.BLOCK)
    assert torch.equal(found, right)
    if elements > 64:  # the first scale is the first group's alone
        scales = scales.clone()
        scales[0] *= 2
        nf4_triton.dequantise(parts["packed"], scales, nf4._codes(weight.device), found, nf4.BLOCK)
        assert not torch.equal(found[:64], right[:64])
        assert torch.equal(found[64:], right[64:])
