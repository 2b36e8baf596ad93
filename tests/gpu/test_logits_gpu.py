"""Losses and gradients through the kernels of `logits` on CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prefix_train import logits as kernels
from prefix_train.loss import target_losses
from tests.unit.test_loss import Table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

DEVICE = torch.device("cuda")


def losses(hidden: Tensor, head: Tensor, table: Table) -> list[Tensor]:
    given = [one.detach().requires_grad_() for one in (hidden, head)]
    found = target_losses(given[0], table, given[1], 1024)
    return [found.each, *torch.autograd.grad(found.total, given)]


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, truth, strict=True)]


@pytest.mark.parametrize("words", [1003, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_further_from_float64_than_torch(words: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(1700, 64, device=DEVICE, generator=generator, dtype=dtype)
    head = torch.randn(words, 64, device=DEVICE, generator=generator, dtype=dtype) * 0.3
    rows = torch.randint(1700, (2100,), device=DEVICE, generator=generator)
    ids = torch.randint(words, (2100,), device=DEVICE, generator=generator)
    weights = torch.rand(2100, device=DEVICE, generator=generator)
    table = Table(rows, ids, weights)
    assert kernels.available(hidden @ head.T)
    mine = losses(hidden, head, table)
    monkeypatch.setattr(kernels, "available", lambda logits: False)
    theirs = losses(hidden, head, table)
    truth = losses(hidden.double(), head.double(), table)
    for fast, slow in zip(errors(mine, truth), errors(theirs, truth), strict=True):
        assert fast <= max(1.05 * slow, 2e-6), (fast, slow)


def test_no_wait_for_the_device() -> None:
    logits = torch.randn(64, 5000, device=DEVICE, dtype=torch.bfloat16)
    starts, words = torch.arange(65, device=DEVICE), torch.arange(64, device=DEVICE)
    ones = torch.ones(64, device=DEVICE)
    for mode in ("default", "error"):  # the first time compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            normaliser = kernels.normalisers(logits)
            kernels.to_gradient(logits, normaliser, ones, starts, words, ones)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(logits).all()


def test_more_than_2_to_the_31_logits() -> None:
    logits = torch.zeros(9000, 248_320, device=DEVICE, dtype=torch.bfloat16)
    logits[8999, 3] = 4.0
    normaliser = kernels.normalisers(logits)
    assert torch.allclose(normaliser[8999], torch.log(torch.tensor(248_319 + torch.e**4, device=DEVICE)), rtol=1e-6)
    starts = torch.zeros(9001, dtype=torch.int64, device=DEVICE)
    nothing = torch.zeros(0, device=DEVICE)
    kernels.to_gradient(logits, normaliser, torch.ones(9000, device=DEVICE), starts, starts[:0], nothing)
    assert torch.allclose(logits[8999].double().sum(), torch.ones((), device=DEVICE, dtype=torch.float64), rtol=1e-2)
