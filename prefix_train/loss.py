"""The weighted sum of target cross-entropies, a chunk of prediction rows at a time.

T positions, D width, V vocabulary, M targets, R distinct prediction rows. Weights are fixed before the forward, so
nothing here divides by a count: chunks, packs and ranks simply add up. Several targets may share one row (siblings that
start with a target are all predicted by their parent's last row): each row passes through the head once.

The vocabulary can come in tiles too: the head then passes by twice, first for each row's normaliser, then for the
gradients, and no more of it need be there than a tile. One tile gives the same bits as the whole head at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from prefix_train import logits as logits_kernels


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


def target_losses(hidden: Tensor, targets: Targets, head: Tensor, chunk_rows: int, chunk_words: int = 0) -> TargetLoss:
    """Weighted sum of the cross-entropies of `targets`, and each of them.

    hidden: [T, D], the body's last hidden states. head: [V, D], the language model's head, in hidden's dtype.
    chunk_rows: rows whose logits exist at a time, for `chunk_words` words of the vocabulary at a time; 0: for all.
    Losses and weight gradients are accumulated in float32, in float64
    where hidden is float64. No target at all gives 0, with gradients that are zero, not missing: every rank
    takes part in every reduction. Raises ValueError where shapes or dtypes do not fit.
    """
    if hidden.dtype != head.dtype or hidden.shape[1] != head.shape[1]:
        raise ValueError(f"hidden is {hidden.dtype} {tuple(hidden.shape)}, head {head.dtype} {tuple(head.shape)}")
    if chunk_rows < 1 or chunk_words < 0:
        raise ValueError(f"chunk_rows is {chunk_rows}; at least 1; chunk_words is {chunk_words}; at least 0")
    table, order = _sorted(targets, torch.promote_types(hidden.dtype, torch.float32))
    total, each = _TargetLoss.apply(hidden, head, table, chunk_rows, chunk_words)  # type: ignore[no-untyped-call]
    return TargetLoss(total, torch.empty_like(each).index_copy_(0, order, each))


def word_tiles(words: int, chunk_words: int) -> list[tuple[int, int]]:
    """(first, end) of each tile of a vocabulary."""
    step = chunk_words or words
    return [(first, min(first + step, words)) for first in range(0, words, step)]


def _sorted(targets: Targets, precision: torch.dtype) -> tuple[_Table, Tensor]:
    """The table of `targets`, and the order in which it has them."""
    order = torch.argsort(targets.rows, stable=True)
    rows, slot, counts = torch.unique_consecutive(targets.rows[order], return_inverse=True, return_counts=True)
    starts = [0, *counts.cumsum(0).tolist()]
    return _Table(rows, slot, targets.ids[order], targets.weights[order].to(precision), counts, starts), order


class PassingHead:
    """One pack's prediction rows while the head passes by them in tiles of words, twice.

    hidden: [T, D], of which the prediction rows are taken. First every tile is `seen`, then each is `learned` from, in
    any order that both engines share. Nothing is differentiable here: `row_grad` is the gradient of `total`.
    """

    def __init__(self, hidden: Tensor, table: _Table, chunk_rows: int) -> None:
        self.table, self.inputs = table, hidden[table.rows]
        self.row_grad: Tensor | None = None
        self._chunk_rows = chunk_rows
        self._normaliser = table.weights.new_full((len(table.rows),), float("-inf"))
        self._own = torch.zeros_like(table.weights)

    @classmethod
    def of(cls, hidden: Tensor, targets: Targets, chunk_rows: int) -> tuple[PassingHead, Tensor]:
        """For `targets` as a batch has them; and the order in which `each` has them."""
        table, order = _sorted(targets, torch.promote_types(hidden.dtype, torch.float32))
        return cls(hidden, table, chunk_rows), order

    @property
    def each(self) -> Tensor:
        """[M]: cross-entropies, once every tile was seen."""
        return self._normaliser[self.table.slot] - self._own

    @property
    def total(self) -> Tensor:
        """Scalar: their weighted sum."""
        return (self.table.weights * self.each).sum()

    def see(self, first: int, tile: Tensor) -> None:
        """tile: [v, D], the head's rows from `first` on."""
        for chunk, entries in _chunks(self.table, self._chunk_rows):
            logits = (self.inputs[chunk] @ tile.T).to(self.table.weights.dtype)
            self._normaliser[chunk] = torch.logaddexp(self._normaliser[chunk], logits.logsumexp(-1))
            words, here = self._words(entries, first, len(tile))
            found = logits[self.table.slot[entries] - chunk.start, words]
            self._own[entries] = torch.where(here, found, self._own[entries])

    def learn(self, first: int, tile: Tensor, head_grad: Tensor | None = None) -> None:
        """Add the gradient through this tile. head_grad: [v, D] of the tile itself, where it is wanted."""
        table = self.table
        sums = torch.zeros_like(self.inputs, dtype=table.weights.dtype) if self.row_grad is None else self.row_grad
        for chunk, entries in _chunks(table, self._chunk_rows):
            inputs = self.inputs[chunk]
            logits = (inputs @ tile.T).to(table.weights.dtype)
            logits -= self._normaliser[chunk, None]
            words, here = self._words(entries, first, len(tile))
            grad = _logits_gradient(logits, table, chunk, entries, words, table.weights[entries] * here).to(tile.dtype)
            sums[chunk] += grad @ tile
            if head_grad is not None:
                head_grad += grad.T @ inputs
        self.row_grad = sums

    def hidden_grad(self, positions: int, total_grad: Tensor) -> Tensor:
        """[positions, D]: gradient of the hidden states."""
        assert self.row_grad is not None
        return _scatter(self.row_grad.to(self.inputs.dtype), self.table.rows, positions, total_grad)

    def _words(self, entries: slice, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Of each entry: its word's row in the tile, and whether it has one there."""
        words = self.table.ids[entries] - first
        return words.clamp(0, count - 1), (words >= 0) & (words < count)


class _TargetLoss(torch.autograd.Function):
    """Gradients are computed beside the losses, while a chunk's logits are there, and only scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, table: _Table, chunk_rows: int, chunk_words: int
    ) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        head_grad = torch.zeros_like(head, dtype=table.weights.dtype) if wants_head else None
        compute = _in_tiles if 0 < chunk_words < len(head) else _at_once
        each, row_grad = compute(hidden, head, table, (chunk_rows, chunk_words), head_grad, wants_hidden)
        ctx.positions = hidden.shape[0]
        ctx.save_for_backward(table.rows, row_grad, None if head_grad is None else head_grad.to(head.dtype))
        ctx.mark_non_differentiable(each)
        return (table.weights * each).sum(), each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        rows, row_grad, head_grad = ctx.saved_tensors
        hidden_grad = None if row_grad is None else _scatter(row_grad, rows, ctx.positions, total_grad)
        return hidden_grad, None if head_grad is None else head_grad * total_grad.to(head_grad.dtype), None, None, None


def _at_once(
    hidden: Tensor, head: Tensor, table: _Table, chunks: tuple[int, int], head_grad: Tensor | None, wants_hidden: bool
) -> tuple[Tensor, Tensor | None]:
    """Cross-entropies [M] and the gradient of the prediction rows, each chunk's logits computed once."""
    each = torch.empty_like(table.weights)
    row_grad = hidden.new_empty(len(table.rows), hidden.shape[1]) if wants_hidden else None
    wanted = row_grad is not None or head_grad is not None
    for chunk, entries in _chunks(table, chunks[0]):
        inputs = hidden[table.rows[chunk]]
        logits = inputs @ head.T
        compute = _by_kernels if logits_kernels.available(logits) else _by_torch
        each[entries], grad = compute(logits, table, chunk, entries, wanted)
        if row_grad is not None:
            row_grad[chunk] = grad @ head
        if head_grad is not None:
            head_grad += grad.T @ inputs
    return each, row_grad


def _in_tiles(
    hidden: Tensor, head: Tensor, table: _Table, chunks: tuple[int, int], head_grad: Tensor | None, wants_hidden: bool
) -> tuple[Tensor, Tensor | None]:
    """The same for tiles of words: each row's normaliser has to be known before there is a gradient."""
    passing = PassingHead(hidden, table, chunks[0])
    tiles = word_tiles(len(head), chunks[1])
    for first, end in tiles:
        passing.see(first, head[first:end])
    each = passing.each
    if not wants_hidden and head_grad is None:
        return each, None
    for first, end in tiles:
        passing.learn(first, head[first:end], None if head_grad is None else head_grad[first:end])
    assert passing.row_grad is not None
    return each, passing.row_grad.to(hidden.dtype) if wants_hidden else None


def _chunks(table: _Table, chunk_rows: int) -> Iterator[tuple[slice, slice]]:
    """Slices of the rows, and of the entries that are theirs."""
    for start in range(0, len(table.rows), chunk_rows):
        chunk = slice(start, min(start + chunk_rows, len(table.rows)))
        yield chunk, slice(table.starts[chunk.start], table.starts[chunk.stop])


def _scatter(row_grad: Tensor, rows: Tensor, positions: int, total_grad: Tensor) -> Tensor:
    hidden_grad = row_grad.new_zeros(positions, row_grad.shape[1])
    hidden_grad[rows] = row_grad * total_grad.to(row_grad.dtype)
    return hidden_grad


def _by_torch(logits: Tensor, table: _Table, chunk: slice, entries: slice, wanted: bool) -> tuple[Tensor, Tensor]:
    """Cross-entropies of the chunk's targets, and, where it is wanted, the gradient of its logits in their dtype."""
    wide = logits.to(table.weights.dtype)
    each = _cross_entropies(wide, table, chunk, entries)
    if not wanted:
        return each, logits
    grad = _logits_gradient(wide, table, chunk, entries, table.ids[entries], table.weights[entries])
    return each, grad.to(logits.dtype)


def _by_kernels(logits: Tensor, table: _Table, chunk: slice, entries: slice, wanted: bool) -> tuple[Tensor, Tensor]:
    """The same, in place."""
    normaliser = logits_kernels.normalisers(logits)
    slot, words, weights = table.slot[entries] - chunk.start, table.ids[entries], table.weights[entries]
    each = normaliser[slot] - logits[slot, words].to(normaliser.dtype)
    if wanted:
        counts = table.counts[chunk]
        per_row = torch.segment_reduce(weights, "sum", lengths=counts)
        starts = F.pad(counts.cumsum(0), (1, 0))
        logits_kernels.to_gradient(logits, normaliser, per_row, starts, words, weights)
    return each, logits


def _cross_entropies(logits: Tensor, table: _Table, chunk: slice, entries: slice) -> Tensor:
    """[entries]: of each target whose row is in `chunk`. Leaves log-probabilities in `logits` ([rows, V])."""
    logits -= logits.logsumexp(-1, keepdim=True)
    return -logits[table.slot[entries] - chunk.start, table.ids[entries]]


def _logits_gradient(
    log_probabilities: Tensor, table: _Table, chunk: slice, entries: slice, words: Tensor, weights: Tensor
) -> Tensor:
    """[rows, v], in place: probability x the row's weights, less each target's own weight at its word."""
    per_row = torch.segment_reduce(table.weights[entries], "sum", lengths=table.counts[chunk])
    gradient = log_probabilities.exp_().mul_(per_row[:, None])
    return gradient.index_put_((table.slot[entries] - chunk.start, words), -weights, accumulate=True)
