"""The weighted sum of target cross-entropies, a chunk of prediction rows at a time.

T positions, D width, V vocabulary, M targets, R distinct prediction rows. Weights are fixed before the forward, so
nothing here divides by a count: chunks, packs and ranks simply add up. Several targets may share one row (siblings that
start with a target are all predicted by their parent's last row): each row passes through the head once.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Targets(Protocol):
    """What the loss reads of a batch's target table: [M] each."""

    rows: Tensor
    ids: Tensor
    weights: Tensor


class TargetLoss(NamedTuple):
    """total: scalar, sum of weight x cross-entropy, differentiable. each: [M], cross-entropies, detached."""

    total: Tensor
    each: Tensor


class _Table(NamedTuple):
    """Targets sorted by row. rows: [R] distinct. slot: [M], target -> place in rows. starts: R + 1 offsets into [M]."""

    rows: Tensor
    slot: Tensor
    ids: Tensor
    weights: Tensor
    counts: Tensor
    starts: list[int]


def target_losses(hidden: Tensor, targets: Targets, head: Tensor, chunk_rows: int) -> TargetLoss:
    """Weighted sum of the cross-entropies of `targets`, and each of them.

    hidden: [T, D], the body's last hidden states. head: [V, D], the language model's head, in hidden's dtype.
    chunk_rows: rows whose logits exist at a time. Losses and weight gradients are accumulated in float32, in float64
    where hidden is float64. No target at all gives 0, with gradients that are zero, not missing: every rank
    takes part in every reduction. Raises ValueError where shapes or dtypes do not fit.
    """
    if hidden.dtype != head.dtype or hidden.shape[1] != head.shape[1]:
        raise ValueError(f"hidden is {hidden.dtype} {tuple(hidden.shape)}, head {head.dtype} {tuple(head.shape)}")
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; at least 1")
    precision = torch.promote_types(hidden.dtype, torch.float32)
    order = torch.argsort(targets.rows, stable=True)
    rows, slot, counts = torch.unique_consecutive(targets.rows[order], return_inverse=True, return_counts=True)
    starts = [0, *counts.cumsum(0).tolist()]
    table = _Table(rows, slot, targets.ids[order], targets.weights[order].to(precision), counts, starts)
    total, each = _TargetLoss.apply(hidden, head, table, chunk_rows)  # type: ignore[no-untyped-call]
    return TargetLoss(total, torch.empty_like(each).index_copy_(0, order, each))


class _TargetLoss(torch.autograd.Function):
    """Gradients are computed beside the losses, while a chunk's logits are there, and only scaled in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, table: _Table, chunk_rows: int) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        precision = table.weights.dtype
        each = torch.empty_like(table.weights)
        hidden_grad = hidden.new_empty(len(table.rows), hidden.shape[1]) if wants_hidden else None
        head_grad = torch.zeros_like(head, dtype=precision) if wants_head else None
        for start in range(0, len(table.rows), chunk_rows):
            chunk = slice(start, min(start + chunk_rows, len(table.rows)))
            entries = slice(table.starts[chunk.start], table.starts[chunk.stop])
            inputs = hidden[table.rows[chunk]]
            logits = (inputs @ head.T).to(precision)
            each[entries] = _cross_entropies(logits, table, chunk, entries)
            if wants_hidden or wants_head:
                logits_grad = _logits_gradient(logits, table, chunk, entries).to(head.dtype)
                if hidden_grad is not None:
                    hidden_grad[chunk] = logits_grad @ head
                if head_grad is not None:
                    head_grad += logits_grad.T @ inputs
        ctx.positions = hidden.shape[0]
        ctx.save_for_backward(table.rows, hidden_grad, None if head_grad is None else head_grad.to(head.dtype))
        ctx.mark_non_differentiable(each)
        return (table.weights * each).sum(), each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, row_grad, head_grad = ctx.saved_tensors
        hidden_grad = None
        if row_grad is not None:
            hidden_grad = row_grad.new_zeros(ctx.positions, row_grad.shape[1])
            hidden_grad[rows] = row_grad * total_grad.to(row_grad.dtype)
        return hidden_grad, None if head_grad is None else head_grad * total_grad.to(head_grad.dtype), None, None


def _cross_entropies(logits: Tensor, table: _Table, chunk: slice, entries: slice) -> Tensor:
    """[entries]: of each target whose row is in `chunk`. Leaves log-probabilities in `logits` ([rows, V])."""
    logits -= logits.logsumexp(-1, keepdim=True)
    return -logits[table.slot[entries] - chunk.start, table.ids[entries]]


def _logits_gradient(log_probabilities: Tensor, table: _Table, chunk: slice, entries: slice) -> Tensor:
    """[rows, V], in place: probability x the row's weights, less each target's own weight."""
    weights = table.weights[entries]
    per_row = torch.segment_reduce(weights, "sum", lengths=table.counts[chunk])
    gradient = log_probabilities.exp_().mul_(per_row[:, None])
    return gradient.index_put_((table.slot[entries] - chunk.start, table.ids[entries]), -weights, accumulate=True)
