"""Norms together with what stands beside them, against transformers' modules in float64: outputs and every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from prefix_train import dropout, fused, norms, norms_triton, residual, unit
from prefix_train.norms import Norm
from tests import batches, models, oracle
from tests.offloading import Trained, backward, trained

SHAPES = [(1, 1, 1), (1, 7, 200), (2, 5, 33), (1, 3, 512)]
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3}


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30))


def module_of(kind: Any, width: int, dtype: torch.dtype, learns: bool) -> Any:
    module = kind(width, eps=1e-6)
    nn.init.normal_(module.weight, 0.3, generator=torch.Generator().manual_seed(7))
    return module.to(dtype).requires_grad_(learns)


def gradients(outs: tuple[Tensor, ...], given: list[Tensor], module: Any, weights: list[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of their weighted sum."""
    total = sum((out.double() * weight).sum() for out, weight in zip(outs, weights, strict=False))
    wanted = [*given, *(one for one in module.parameters() if one.requires_grad)]
    return [*(out.detach() for out in outs), *torch.autograd.grad(total, wanted)]  # type: ignore[arg-type]


def leaves(given: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [one.detach().to(dtype).requires_grad_() for one in given]


def in_float64(outs: Any, given: list[Tensor], module: Any, weights: list[Tensor]) -> list[Tensor]:
    with oracle.float64():
        wide, cast = copy.deepcopy(module).double(), leaves(given, torch.float64)
        return gradients(outs(wide, cast), cast, wide, weights)


@pytest.mark.parametrize("learns", [False, True], ids=["frozen", "learns"])
@pytest.mark.parametrize("kind", [Qwen3_5RMSNorm, LlamaRMSNorm])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows(shape: tuple[int, ...], kind: Any, learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms_triton, "PARTS", 3)
    weights = [drawn(*shape, seed=seed, dtype=torch.float64) for seed in (20, 21)]
    for dtype, bound in BOUNDS.items():
        given = [drawn(*shape, seed=seed, dtype=dtype) for seed in (1, 2)]
        module = module_of(kind, shape[-1], dtype, learns)
        how = Norm(module.weight, 1e-6, kind is Qwen3_5RMSNorm)
        for summed in (False, True):
            some = leaves(given[: 1 + summed], dtype)
            outs = norms.of_sum(*some, how) if summed else norms.beside(*some, how)
            if summed:
                assert torch.equal(outs[0], given[0] + given[1])
                assert error(outs[1].detach(), module(outs[0]).detach()) < bound
            truth = in_float64(lambda own, x: (sum(x), own(sum(x))), some, module, weights)
            for found, true in zip(gradients(outs, some, module, weights), truth, strict=True):
                assert found.dtype == dtype
                assert error(found, true) < 2 * bound


@pytest.mark.parametrize("learns", [False, True], ids=["frozen", "learns"])
@pytest.mark.parametrize("shape", [(2, 8), (131, 8), (67, 33)])
def test_a_gated_norm(shape: tuple[int, ...], learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms_triton, "PARTS", 2)
    monkeypatch.setattr(norms_triton, "ELEMENTS", 512)
    weights = [drawn(*shape, seed=seed, dtype=torch.float64) for seed in (20, 21)]
    for dtype, bound in BOUNDS.items():
        given = leaves([drawn(*shape, seed=seed, dtype=dtype) for seed in (1, 2)], dtype)
        module = module_of(Qwen3_5RMSNormGated, shape[-1], dtype, learns)
        sizes = [1, len(given[0]) - 1]
        out = norms.gated(torch.split(given[0], sizes), given[1], Norm(module.weight, 1e-6, False))
        truth = in_float64(lambda own, x: (own(*x),), given, module, weights)
        for found, true in zip(gradients((out,), given, module, weights), truth, strict=True):
            assert found.dtype == dtype
            assert error(found, true) < 2 * bound


def run(base: Any, packs: list[Any], one_kernel: bool, monkeypatch: pytest.MonkeyPatch, **given: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(fused, "one_kernel", lambda *_: one_kernel)
        made: Trained = trained(copy.deepcopy(base), packs, "none", tile_rows=8, **given)
        layers = made.stepper.root.anatomy.layers
        kinds = [type(unit._forward_of(layer)._inner) for layer in layers]
        assert kinds == [residual.Layer] * len(layers)
        return backward(made, packs)


def forgetful(patch: pytest.MonkeyPatch) -> None:
    """The fault: a norm's gradient without the one that comes beside it."""
    inner = norms_triton.rows_backward
    patch.setattr(norms_triton, "rows_backward", lambda first, *rest: inner(torch.zeros_like(first), *rest))


@pytest.mark.parametrize("family", ["qwen3_5_text", "llama"])
@pytest.mark.parametrize("middle", ["none", "auto"])
@pytest.mark.parametrize("adapted", [True, False], ids=["adapter", "all"])
def test_a_model(family: str, middle: str, adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole layers and halves, weights frozen or trained, against the same without these kernels."""
    monkeypatch.setattr(dropout, "BLOCK", 4)
    base = models.build(family)
    packs = batches.batches(batches.make(base, 4), [[0, 1, 2, 3]])
    given = {"rank": 2, "dropout": 0.3, "targets": ["q_proj", "o_proj", "gate_proj"]} if adapted else {}
    right = run(base, packs, False, monkeypatch, middle=middle, **given)
    found = run(base, packs, True, monkeypatch, middle=middle, **given)
    worst = max(error(found[name], one) for name, one in right.items() if one.any())
    assert worst < 1e-4
    if (family, middle, adapted) == ("llama", "none", True):
        forgetful(monkeypatch)
        wrong = run(base, packs, True, monkeypatch, middle=middle, **given)
        assert max(error(wrong[name], one) for name, one in right.items() if one.any()) > 0.1
