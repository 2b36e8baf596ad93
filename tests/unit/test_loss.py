"""The chunked loss against autograd through whole logits, and the faults that chunked losses are known for."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from prefix_train.loss import PassingHead, target_losses


@dataclass
class Table:
    rows: Tensor
    ids: Tensor
    weights: Tensor


def make(positions: int, width: int, vocabulary: int, targets: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Table]:
    """Hidden states, head and targets; rows repeat, are unsorted, and never predict one id twice."""
    generator = torch.Generator().manual_seed(targets)
    hidden = torch.randn(positions, width, generator=generator, dtype=dtype)
    head = torch.randn(vocabulary, width, generator=generator, dtype=dtype)
    pairs = torch.randperm(positions * vocabulary, generator=generator)[:targets]
    weights = torch.rand(targets, generator=generator) / max(targets, 1)
    return hidden, head, Table(pairs // vocabulary, pairs % vocabulary, weights)


def plain(hidden: Tensor, head: Tensor, table: Table) -> Tensor:
    """Autograd through all logits at once."""
    logits = hidden[table.rows] @ head.T
    return (table.weights.to(hidden.dtype) * functional.cross_entropy(logits, table.ids, reduction="none")).sum()


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("targets", [1, 2, 63, 200])
@pytest.mark.parametrize("chunk", [1, 3, 64, 65, 4096])
def test_r16_loss_and_gradients_do_not_depend_on_the_chunk(targets: int, chunk: int) -> None:
    hidden, head, table = make(37, 5, 11, targets, torch.float64)
    hidden.requires_grad_()
    head.requires_grad_()
    expected = plain(hidden, head, table)
    result = target_losses(hidden, table, head, chunk)
    torch.testing.assert_close(result.total, expected, rtol=1e-13, atol=0)
    each = functional.cross_entropy(hidden[table.rows] @ head.T, table.ids, reduction="none")
    torch.testing.assert_close(result.each, each.detach(), rtol=1e-12, atol=1e-13)
    assert not result.each.requires_grad
    for ours, theirs in zip(
        gradients(3 * result.total, hidden, head), gradients(3 * expected, hidden, head), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


def test_r16_no_target_gives_zero_and_zero_gradients() -> None:
    hidden, head, table = make(9, 5, 11, 0, torch.float32)
    hidden.requires_grad_()
    head.requires_grad_()
    result = target_losses(hidden, table, head, 4)
    assert result.total.item() == 0
    assert result.each.shape == (0,)
    for gradient, leaf in zip(gradients(result.total, hidden, head), (hidden, head), strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


def test_r16_fails_without_fix() -> None:
    """A loss that adds up means over chunks grows with the number of chunks."""
    hidden, head, table = make(128, 8, 16, 512, torch.float64)
    losses = functional.cross_entropy(hidden[table.rows] @ head.T, table.ids, reduction="none")
    summed = [float(sum(part.mean() for part in losses.split(chunk))) for chunk in (512, 128)]
    assert summed[1] > 3.9 * summed[0]
    table.weights[:] = 1 / 512
    ours = [float(target_losses(hidden, table, head, chunk).total) for chunk in (512, 128)]
    assert ours[0] == pytest.approx(ours[1], rel=1e-13)


def per_chunk_mean(hidden: Tensor, head: Tensor, labels: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The published fault: the loss is right, but each chunk's gradient is divided by the chunk's own count."""
    gradient = torch.zeros_like(hidden)
    total, count = hidden.new_zeros(()), (labels != -100).sum()
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        part = hidden[rows].detach().requires_grad_()
        logits = part @ head.T
        total += functional.cross_entropy(logits, labels[rows], reduction="sum", ignore_index=-100).detach()
        functional.cross_entropy(logits, labels[rows], ignore_index=-100).backward()
        gradient[rows] = part.grad
    return total / count, gradient


def test_r26_each_chunk_divided_by_its_own_count() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(64, 32, generator=generator, dtype=torch.float64)
    labels = torch.randint(64, (512,), generator=generator)
    labels[torch.rand(512, generator=generator) < 0.6] = -100
    expected = functional.cross_entropy(hidden @ head.T, labels, ignore_index=-100)
    (autograd,) = gradients(expected, hidden)

    planted_loss, planted = per_chunk_mean(hidden.detach(), head, labels, 128)
    assert planted_loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert (planted - autograd).norm() > 1.0 * autograd.norm()

    rows = (labels != -100).nonzero()[:, 0]
    table = Table(rows, labels[rows], torch.full((len(rows),), 1 / len(rows), dtype=torch.float64))
    ours = target_losses(hidden, table, head, 128).total
    assert ours.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradients(ours, hidden)[0], autograd, rtol=1e-12, atol=1e-16)


def test_bfloat16_accumulates_in_float32() -> None:
    """2,000 targets in chunks of 16: the head's gradient keeps what a bfloat16 running sum would lose."""
    hidden, head, table = make(2000, 4, 8, 2000, torch.bfloat16)
    hidden.requires_grad_()
    head.requires_grad_()
    table.ids[:] = 3
    table.rows = torch.arange(2000)
    wide_hidden, wide_head = hidden.detach().double().requires_grad_(), head.detach().double().requires_grad_()
    result = target_losses(hidden, table, head, 16)
    assert result.total.dtype == result.each.dtype == torch.float32
    expected = plain(wide_hidden, wide_head, table)
    assert result.total.item() == pytest.approx(expected.item(), rel=2e-3)
    ours = gradients(result.total, hidden, head)
    for mine, theirs in zip(ours, gradients(expected, wide_hidden, wide_head), strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - theirs).norm() < 0.01 * theirs.norm()


def test_logits_never_exceed_a_chunk_and_a_frozen_head_has_no_buffer() -> None:
    hidden, head, table = make(300, 4, 50, 300, torch.float32)
    hidden.requires_grad_()
    largest: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            largest.extend(part.numel() for part in torch.utils._pytree.tree_leaves(result) if isinstance(part, Tensor))
            return result

    with Sizes():
        target_losses(hidden, table, head, 10).total.backward()
    assert max(largest) <= max(10 * 50, hidden.numel())
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tuple(tensor.shape)) or tensor, lambda t: t
    ):
        target_losses(hidden, table, head, 10)
    assert tuple(head.shape) not in saved


def test_refuses_what_does_not_fit() -> None:
    hidden, head, table = make(5, 4, 8, 3, torch.float32)
    with pytest.raises(ValueError, match="chunk_rows is 0"):
        target_losses(hidden, table, head, 0)
    with pytest.raises(ValueError, match="bfloat16"):
        target_losses(hidden.bfloat16(), table, head, 8)


# The vocabulary in tiles.


@pytest.mark.parametrize("words", [1, 4, 10, 11, 12])
@pytest.mark.parametrize("targets", [0, 1, 63, 200])
@pytest.mark.parametrize("chunk", [3, 4096])
def test_loss_and_gradients_do_not_depend_on_tiles_of_words(words: int, targets: int, chunk: int) -> None:
    hidden, head, table = make(37, 5, 11, targets, torch.float64)
    hidden.requires_grad_()
    head.requires_grad_()
    whole, tiled = target_losses(hidden, table, head, chunk), target_losses(hidden, table, head, chunk, words)
    torch.testing.assert_close(tiled.total, whole.total, rtol=1e-13, atol=0)
    torch.testing.assert_close(tiled.each, whole.each, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(
        gradients(3 * tiled.total, hidden, head), gradients(3 * whole.total, hidden, head), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_tile_is_the_whole_head_to_the_bit(dtype: torch.dtype) -> None:
    hidden, head, table = make(37, 64, 128, 200, dtype)
    hidden.requires_grad_()
    whole = target_losses(hidden, table, head, 16)
    passing, order = PassingHead.of(hidden.detach(), table, 16)
    passing.see(0, head)
    passing.learn(0, head)
    assert torch.equal(torch.empty_like(passing.each).index_copy_(0, order, passing.each), whole.each)
    assert torch.equal(passing.total, whole.total)
    (theirs,) = gradients(whole.total, hidden)
    assert torch.equal(passing.hidden_grad(37, torch.ones(())), theirs)


def test_a_head_in_tiles_that_is_frozen_gets_no_gradient() -> None:
    hidden, head, table = make(37, 5, 11, 20, torch.float64)
    hidden.requires_grad_()
    target_losses(hidden, table, head, 8, 4).total.backward()
    assert head.grad is None
    with pytest.raises(ValueError, match="chunk_words is -1"):
        target_losses(hidden, table, head, 8, -1)
