"""Norms of rows together with what stands beside them: the residual sum before, the sum of gradients, the gate behind.

    total = hidden + added      normed = norm(total)                  out = norm(x) * silu(gate)

Each is one pass over memory, forward and backward. What is written is rounded where the model's own modules write it;
between, numbers are float32, and so is the sum of a norm's gradient and the one that comes beside it. Kept are what
the norm reads, a scale for each row, and the gate. Kernels in Triton, which search for nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Norm(NamedTuple):
    """weight: [D]. centred: scales by 1 + weight, all in float32; else rounds before it scales by the weight."""

    weight: Tensor
    eps: float
    centred: bool


def beside(hidden: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """`hidden`, [..., D], and its norm."""
    found: tuple[Tensor, Tensor] = _Rows.apply(hidden, None, *norm)  # type: ignore[no-untyped-call]
    return found


def of_sum(hidden: Tensor, added: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """hidden + added, [..., D], and its norm."""
    found: tuple[Tensor, Tensor] = _Rows.apply(hidden, added, *norm)  # type: ignore[no-untyped-call]
    return found


def gated(parts: Sequence[Tensor], gate: Tensor, norm: Norm) -> Tensor:
    """norm(x) * silu(gate), [..., D]; the norm is none that is centred. parts: of x, whose rows follow each other."""
    out: Tensor = _Gated.apply(gate, norm.weight, norm.eps, *parts)  # type: ignore[no-untyped-call]
    return out


class _Rows(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float, centred: bool
    ) -> tuple[Tensor, Tensor]:
        total, normed, scales = _kernels().rows(hidden.contiguous(), added, weight, eps, centred)
        ctx.centred = centred
        ctx.save_for_backward(total, weight, scales)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_total: Tensor, of_normed: Tensor) -> tuple[Tensor | None, ...]:
        learns = ctx.needs_input_grad[2]
        given = (of_total.contiguous(), of_normed.contiguous(), *ctx.saved_tensors, ctx.centred, learns)
        total, of_weight = _kernels().rows_backward(*given)
        return total, total if ctx.needs_input_grad[1] else None, of_weight, None, None


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, weight: Tensor, eps: float, *parts: Tensor) -> Tensor:
        gate, whole, ctx.eps = gate.contiguous(), [part.contiguous() for part in parts], eps
        ctx.save_for_backward(gate, weight, *whole)
        out = torch.empty_like(gate)
        for part, of_part, into in zip(whole, _along(whole, gate), _along(whole, out), strict=True):
            _kernels().gated(part, of_part, weight, eps, into)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, weight, *parts = ctx.saved_tensors
        of_gate, of_parts, learned = torch.empty_like(gate), [], []
        rows = zip(parts, *(_along(parts, one) for one in (grad.contiguous(), gate, of_gate)), strict=True)
        for part, grads, gates, into in rows:
            given = grads, part, gates, weight, ctx.eps, into, ctx.needs_input_grad[1]
            of_part, sums = _kernels().gated_backward(*given)
            of_parts.append(of_part)
            learned.append(sums)
        of_weight = torch.stack(learned).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return of_gate, of_weight, None, *of_parts


def _along(parts: Sequence[Tensor], whole: Tensor) -> list[Tensor]:
    """The rows of `whole`, [rows, D], that belong to each part."""
    width = whole.shape[-1]
    return list(torch.split(whole.view(-1, width), [part.numel() // width for part in parts]))


def _kernels() -> Any:
    return importlib.import_module("prefix_train.norms_triton")
