"""Losses and gradients through the kernels of `logits` against plain torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from prefix_train import logits as kernels
from prefix_train import logits_triton
from prefix_train.loss import target_losses

WORDS = 331


class Targets(NamedTuple):
    rows: Tensor
    ids: Tensor
    weights: Tensor


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def targets() -> Targets:
    """Rows with one target, with several, with the same word several times; the first and the last word."""
    rows = torch.tensor([4, 9, 9, 9, 0, 17, 18, 18, 21, 9])
    ids = torch.tensor([0, 5, 330, 5, 63, 64, 7, 8, 330, 129])
    return Targets(rows, ids, torch.linspace(0.1, 1.3, len(rows)))


def losses(hidden: Tensor, head: Tensor, chunk_rows: int) -> list[Tensor]:
    given = [one.clone().requires_grad_() for one in (hidden, head)]
    found = target_losses(*given[:1], targets(), given[1], chunk_rows)
    return [found.each, *torch.autograd.grad(found.total * 1.7, given)]


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, truth, strict=True)]


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels' calls, on a CPU too; words in several blocks."""
    calls: list[str] = []
    monkeypatch.setattr(kernels, "available", kernels.fits)
    monkeypatch.setattr(logits_triton, "BLOCK", 64)

    def counted(name: str) -> Callable[..., Tensor]:
        inner = getattr(kernels, name)

        def call(*of: Tensor) -> Tensor:
            calls.append(name)
            found: Tensor = inner(*of)
            return found

        return call

    for name in ("normalisers", "to_gradient"):
        monkeypatch.setattr(kernels, name, counted(name))
    return calls


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 1e-3)])
def test_equals_float64(used: list[str], dtype: torch.dtype, bound: float, chunk_rows: int) -> None:
    hidden, head = drawn(24, 16, seed=1, dtype=dtype), drawn(WORDS, 16, seed=2, dtype=dtype)
    found = losses(hidden, head, chunk_rows)
    assert used.count("normalisers") == used.count("to_gradient") == -(-6 // chunk_rows)
    assert max(errors(found, losses(hidden.double(), head.double(), chunk_rows))) < bound
    assert used.count("normalisers") == -(-6 // chunk_rows), "float64 is not the kernels'"


def test_rounds_where_torch_does(used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head = drawn(24, 16, seed=1, dtype=torch.float16), drawn(WORDS, 16, seed=2, dtype=torch.float16)
    found = losses(hidden, head, 100)
    monkeypatch.setattr(kernels, "available", lambda logits: False)
    wanted = losses(hidden, head, 100)
    assert used == ["normalisers", "to_gradient"]
    assert max(errors(found, wanted)) < 1e-4  # a few entries on the other side of a rounding


@pytest.mark.parametrize("scale", [1e-3, 300.0])
def test_large_and_small_logits(scale: float) -> None:
    given = drawn(5, 1000, seed=3) * scale
    given[2, 17:] = float("-inf")
    found = kernels.normalisers(given)
    assert torch.allclose(found, given.double().logsumexp(-1).float(), rtol=1e-6, atol=1e-5)


def test_rows_of_a_wider_tensor() -> None:
    wide = drawn(6, 400, seed=4)
    part = wide[:, :WORDS]
    kept = wide[:, WORDS:].clone()
    truth = part.double().softmax(-1) * 2.0
    truth[torch.arange(6), torch.arange(6)] -= 0.5
    normaliser = kernels.normalisers(part)
    kernels.to_gradient(
        part, normaliser, torch.full((6,), 2.0), torch.arange(7), torch.arange(6), torch.full((6,), 0.5)
    )
    assert errors([part], [truth]) < [1e-6]
    assert torch.equal(wide[:, WORDS:], kept)


def test_a_planted_fault_is_found(used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's targets begin one entry too late."""
    hidden, head = drawn(24, 16, seed=1), drawn(WORDS, 16, seed=2)
    inner = kernels.to_gradient
    monkeypatch.setattr(kernels, "to_gradient", lambda *of: inner(*of[:3], (of[3] + 1).clamp(max=10), *of[4:]))
    found, truth = losses(hidden, head, 100), losses(hidden.double(), head.double(), 100)
    assert max(errors(found, truth)) > 1e-2
