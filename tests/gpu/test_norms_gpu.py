"""Norms together with what stands beside them on CUDA, at a 27B model's widths: outputs and every gradient."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from prefix_train import norms
from prefix_train.norms import Norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]

Outs = Callable[[Any, list[Tensor]], tuple[Tensor, ...]]


def gradients(outs: Outs, module: nn.Module, given: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    given = [one.detach().clone().requires_grad_() for one in given]
    found = outs(module, given)
    total = sum((out.double() * weight).sum() for out, weight in zip(found, weights, strict=True))
    return [*(one.detach() for one in found), *torch.autograd.grad(total, [*given, *module.parameters()])]  # type: ignore[arg-type]


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm())


def compare(module: nn.Module, given: list[Tensor], mine: Outs, own: Outs, outputs: int) -> None:
    """In float32 to rounding; in bfloat16 no further from float64 than 1.1 times the module's own operations."""
    weights = [torch.randn(given[0].shape, dtype=torch.float64, device="cuda") for _ in range(outputs)]
    for dtype in (torch.float32, torch.bfloat16):
        cast, held = [one.to(dtype) for one in given], copy.deepcopy(module).to(dtype)
        truth = gradients(own, copy.deepcopy(held).double(), [one.double() for one in cast], weights)
        found, theirs = (gradients(outs, held, cast, weights) for outs in (mine, own))
        for fast, slow, true in zip(found, theirs, truth, strict=True):
            floor = 2e-6 if dtype == torch.float32 else 1e-3
            assert error(fast, true) <= max(1.1 * error(slow, true), floor)


@pytest.mark.parametrize("shape", [(1, 1333, 5120), (1, 65, 4097)])
@pytest.mark.parametrize("kind", [Qwen3_5RMSNorm, LlamaRMSNorm])
def test_rows(shape: tuple[int, ...], kind: Any) -> None:
    torch.manual_seed(1)
    module, centred = kind(shape[-1], eps=1e-6).cuda(), kind is Qwen3_5RMSNorm
    nn.init.normal_(module.weight, 0.3)
    given = [torch.randn(shape, device="cuda") for _ in range(2)]

    def summed(own: Any, x: list[Tensor]) -> tuple[Tensor, ...]:
        return norms.of_sum(x[0], x[1], Norm(own.weight, 1e-6, centred))

    def beside(own: Any, x: list[Tensor]) -> tuple[Tensor, ...]:
        return norms.beside(x[0], Norm(own.weight, 1e-6, centred))

    compare(module, given, summed, lambda own, x: (x[0] + x[1], own(x[0] + x[1])), 2)
    compare(module, given[:1], beside, lambda own, x: (x[0] * 1, own(x[0])), 2)
    total, _ = norms.of_sum(given[0].bfloat16(), given[1].bfloat16(), Norm(module.weight.bfloat16(), 1e-6, centred))
    assert torch.equal(total, given[0].bfloat16() + given[1].bfloat16())


@pytest.mark.parametrize("shape", [(4099, 128), (777, 96)])
def test_gated(shape: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    module = Qwen3_5RMSNormGated(shape[-1], eps=1e-6).cuda()
    nn.init.normal_(module.weight, 1.0, 0.1)
    given = [torch.randn(shape, device="cuda") for _ in range(2)]

    def mine(own: Any, x: list[Tensor]) -> tuple[Tensor, ...]:
        return (norms.gated(x[0].split([300, len(x[0]) - 300]), x[1], Norm(own.weight, 1e-6, False)),)

    compare(module, given, mine, lambda own, x: (own(x[0], x[1]),), 1)
