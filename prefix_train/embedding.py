"""Looking up embeddings, with a gradient that adds up in float32.

torch adds the gradients of a token's occurrences in the weights' own dtype: with 2,000 occurrences in bfloat16 the sum
is off by more than half. A pack holds thousands of positions and a small vocabulary's tokens many times each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from prefix_train.sums import sum_runs


def embed(table: nn.Module, ids: Tensor) -> Tensor:
    """[..., D]: `table(ids)`. table: an nn.Embedding, or a module that is left to do it by itself where it is none."""
    if type(table) is not nn.Embedding or not table.weight.requires_grad or not torch.is_grad_enabled():
        found: Tensor = table(ids)
        return found
    looked_up: Tensor = _Embed.apply(table.weight, ids, table.padding_idx)  # type: ignore[no-untyped-call]
    return looked_up


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.dtype, ctx.padding = len(weight), weight.dtype, padding
        return functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        order = torch.argsort(ids.flatten(), stable=True)
        tokens, counts = torch.unique_consecutive(ids.flatten()[order], return_counts=True)
        sums = sum_runs(gradient.flatten(0, -2)[order], counts)
        if ctx.padding is not None:
            sums[tokens == ctx.padding] = 0
        weight_grad = gradient.new_zeros(ctx.rows, gradient.shape[-1], dtype=ctx.dtype)
        weight_grad[tokens] = sums.to(ctx.dtype)
        return weight_grad, None, None
