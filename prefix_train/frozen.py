"""Adapted linear modules and gated feed-forwards whose weights are frozen, a tile of rows at a time.

As in `tiles` their inputs alone are kept, and no product is computed that nothing reads; backward is written out, so
that every gradient is put or added where it belongs. Where anything is not as `products` wants it, what was there
before computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from prefix_train import dropout, fused, products, unit
from prefix_train.dropout import SeededDropout
from prefix_train.products import Product, Weights


class Adapted:
    """Replaces the forward of a linear module with an adapter. rows: of a tile. otherwise: computes what is not so.
    unread: nothing reads the output in a recomputation."""

    def __init__(self, module: nn.Module, rows: int, otherwise: Callable[..., Tensor], unread: bool = False) -> None:
        self.product, self.rows, self.otherwise, self.unread = Product(module), rows, otherwise, unread
        self.dropouts = _dropouts(self.product)

    def __call__(self, inputs: Tensor) -> Tensor:
        weights = self.product.ready(inputs)
        if weights is None:
            return self.otherwise(inputs)
        out: Tensor = _Adapted.apply(self, inputs, *weights)  # type: ignore[no-untyped-call]
        return out


class _Adapted(Function):
    @staticmethod
    def forward(ctx: Any, adapted: Adapted, inputs: Tensor, *tensors: Tensor) -> Tensor:
        product, weights, flat = adapted.product, Weights(*tensors), inputs.reshape(-1, inputs.shape[-1])
        tiles = dropout.tiles(adapted.dropouts, len(flat), adapted.rows)
        if adapted.unread and unit.recomputing():
            out = products.unread(inputs, len(weights.weight))
            low = [product.low(flat[rows], weights) for rows in tiles]
        else:
            out = inputs.new_empty(len(flat), len(weights.weight))
            low = [product.forward(flat[rows], weights, out[rows])[1] for rows in tiles]
        ctx.adapted, ctx.draw = adapted, dropout.draw_of(adapted.dropouts)
        ctx.save_for_backward(inputs, products.rows(low), *tensors)
        return out.view(*inputs.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        adapted: Adapted = ctx.adapted
        inputs, low, *tensors = ctx.saved_tensors
        weights, sums = Weights(*tensors), Sums()
        flat, grads = inputs.reshape(-1, inputs.shape[-1]), grad.reshape(-1, grad.shape[-1])
        into = torch.empty_like(flat) if ctx.needs_input_grad[1] else None
        dropout.set_draw(adapted.dropouts, ctx.draw)
        for rows in dropout.tiles(adapted.dropouts, len(flat), adapted.rows):
            given = grads[rows], flat[rows], low[rows], weights
            sums.add(adapted.product.backward(*given, None if into is None else into[rows]))
        return None, None if into is None else into.view(inputs.shape), None, None, *sums.of(weights)


class FeedForward:
    """Replaces the forward of down(silu(gate(x)) * up(x)). rows: of a tile. otherwise: computes what is not so.
    unread: nothing reads the output in a recomputation."""

    def __init__(
        self, block: Any, rows: int, elementwise: str, otherwise: Callable[..., Tensor], unread: bool = True
    ) -> None:
        self.products = tuple(map(Product, (block.gate_proj, block.up_proj, block.down_proj)))
        self.rows, self.elementwise, self.otherwise, self.unread = rows, elementwise, otherwise, unread
        self.dropouts = _dropouts(*self.products)

    def __call__(self, inputs: Tensor) -> Tensor:
        tensors = products.ready(self.products, inputs)
        if tensors is None:
            return self.otherwise(inputs)
        out: Tensor = _FeedForward.apply(self, inputs, *tensors)  # type: ignore[no-untyped-call]
        return out

    def forward(self, x: Tensor, weights: Sequence[Weights], out: Tensor) -> None:
        """A tile: [n, hidden] into `out`, [n, hidden]."""
        (gate, up, down), (of_gate, of_up, of_down) = self.products, weights
        inner = fused.activate(gate.forward(x, of_gate)[0], up.forward(x, of_up)[0], self.elementwise)
        down.forward(inner, of_down, out)

    def backward(
        self, grad: Tensor, x: Tensor, weights: Sequence[Weights], into: Tensor | None
    ) -> list[tuple[Tensor, Tensor] | None]:
        """A tile's gradients: of x into `into`, and of each adapter. down's input is there for its adapter alone."""
        (gate, up, down), (of_gate, of_up, of_down) = self.products, weights
        opened, low_gate = gate.forward(x, of_gate)
        other, low_up = up.forward(x, of_up)
        inner = opened if of_down.a is None else fused.activate(opened, other, self.elementwise)
        of_inner = torch.empty_like(opened)
        found_down = down.backward(grad, inner, None, of_down, of_inner)
        grad_gate, grad_up = fused.activate_backward(of_inner, opened, other, self.elementwise)
        found_gate = gate.backward(grad_gate, x, low_gate, of_gate, into)
        found_up = up.backward(grad_up, x, low_up, of_up, into, more=True)
        return [found_gate, found_up, found_down]


class _FeedForward(Function):
    @staticmethod
    def forward(ctx: Any, block: FeedForward, inputs: Tensor, *tensors: Tensor) -> Tensor:
        ctx.block, ctx.draw = block, dropout.draw_of(block.dropouts)
        ctx.save_for_backward(inputs, *tensors)
        if block.unread and unit.recomputing():
            return products.unread(inputs, inputs.shape[-1])
        flat, weights = inputs.reshape(-1, inputs.shape[-1]), products.several(tensors)
        out = torch.empty_like(flat)
        for rows in dropout.tiles(block.dropouts, len(flat), block.rows):
            block.forward(flat[rows], weights, out[rows])
        return out.view(inputs.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        block: FeedForward = ctx.block
        inputs, *tensors = ctx.saved_tensors
        weights = products.several(tensors)
        flat, grads = inputs.reshape(-1, inputs.shape[-1]), grad.reshape(-1, grad.shape[-1])
        into, sums = torch.empty_like(flat) if ctx.needs_input_grad[1] else None, [Sums() for _ in weights]
        dropout.set_draw(block.dropouts, ctx.draw)
        for rows in dropout.tiles(block.dropouts, len(flat), block.rows):
            found = block.backward(grads[rows], flat[rows], weights, None if into is None else into[rows])
            for total, part in zip(sums, found, strict=True):
                total.add(part)
        of_adapters = [one for total, held in zip(sums, weights, strict=True) for one in (None, None, *total.of(held))]
        return None, None if into is None else into.view(inputs.shape), *of_adapters


class Sums:
    """An adapter's gradients over tiles, in at least float32; of a single tile as they are."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._count = 0

    def add(self, found: tuple[Tensor, Tensor] | None) -> None:
        """Of one more tile."""
        if found is None:
            return
        self._count += 1
        if self._count == 1:
            self._sums = list(found)
            return
        if self._count == 2:
            self._sums = [one.to(torch.promote_types(one.dtype, torch.float32)) for one in self._sums]
        for total, one in zip(self._sums, found, strict=True):
            total += one

    def of(self, weights: Weights) -> tuple[Tensor | None, Tensor | None]:
        """Of A and B, in their dtypes; None without an adapter."""
        if not self._sums:
            return None, None
        of_a, of_b = self._sums
        assert weights.a is not None
        return of_a.to(weights.a.dtype), of_b.to(weights.a.dtype)


def _dropouts(*products: Product) -> list[SeededDropout]:
    return [product.dropout for product in products if product.dropout is not None]
