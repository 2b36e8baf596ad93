"""Linear modules that read the same rows, as one function of autograd: their gradients of these rows add up in one
buffer, each product adding to it as it writes, instead of a tensor each and sums of them.

A mixer calls its modules one after the other. The first call computes for all; the others find what is theirs by the
very tensor that they are given. Weights are frozen, as `products` wants them; where they are not so, each module
computes as it would by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from prefix_train import dropout, products
from prefix_train.frozen import Sums
from prefix_train.halves import PRODUCTS
from prefix_train.products import Product, Weights


class Together:
    """Modules that `products.knows`, and that are given the same tensor. rows: of a tile where there is an adapter."""

    def __init__(self, modules: Sequence[nn.Module], rows: int) -> None:
        self.products = [Product(module) for module in modules]
        self.rows = rows
        self.dropouts = [one.dropout for one in self.products if one.dropout is not None]
        self._inputs: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def output(self, index: int, inputs: Tensor) -> Tensor | None:
        """Of module `index`, [..., in] -> [..., out]; None where each computes by itself."""
        if self._inputs is not inputs or index not in self._outputs:
            self._inputs, self._outputs = None, {}
            tensors = products.ready(self.products, inputs)
            if tensors is None:
                return None
            self._outputs = dict(enumerate(_Together.apply(self, inputs, *tensors)))  # type: ignore[no-untyped-call]
            self._inputs = inputs
        found = self._outputs.pop(index)
        if not self._outputs:
            self._inputs = None
        return found

    def tiles(self, product: Product, count: int) -> Iterator[slice]:
        """Slices of `count` rows: all at once where nothing of the width of a row is made for an adapter."""
        dropouts = [] if product.dropout is None else [product.dropout]
        return dropout.tiles(dropouts, count, count if product.name is None else self.rows)


class Member:
    """Replaces the forward of module `index`. otherwise: computes what is not so."""

    def __init__(self, together: Together, index: int, otherwise: Callable[..., Tensor]) -> None:
        self.together, self.index, self.otherwise = together, index, otherwise

    def __call__(self, inputs: Tensor) -> Tensor:
        found = self.together.output(self.index, inputs)
        return self.otherwise(inputs) if found is None else found


def install(mixer: nn.Module, rows: int) -> None:
    """Let the linear modules of a token mixer compute together: its forward gives the same tensor to all but the last.
    rows: of a tile."""
    children = {name: child for name, child in mixer.named_children() if name not in PRODUCTS}
    modules = [child for child in children.values() if products.knows(child)]
    if len(modules) > 1:
        together = Together(modules, rows)
        for index, module in enumerate(modules):
            module.forward = Member(together, index, module.forward)


class _Together(Function):
    @staticmethod
    def forward(ctx: Any, together: Together, inputs: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.together, ctx.draw, ctx.shape = together, dropout.draw_of(together.dropouts), inputs.shape
        flat = inputs.reshape(-1, inputs.shape[-1])
        outs, lows = [], []
        for product, weights in zip(together.products, products.several(tensors), strict=True):
            outs.append(inputs.new_empty(*inputs.shape[:-1], len(weights.weight)))
            out, tiles = outs[-1].view(len(flat), -1), together.tiles(product, len(flat))
            low = [product.forward(flat[rows], weights, out[rows])[1] for rows in tiles]
            lows.append(products.rows(low))
        adapted = any(product.name is not None for product in together.products)
        ctx.save_for_backward(inputs if adapted else None, *lows, *tensors)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        together: Together = ctx.together
        count = len(together.products)
        inputs, *saved = ctx.saved_tensors
        weights, width = products.several(saved[count:]), ctx.shape[-1]
        dropout.set_draw(together.dropouts, ctx.draw)
        of_weights: list[Tensor | None] = []
        into: Tensor | None = None
        more = False
        for product, low, held, grad in zip(together.products, saved[:count], weights, grads, strict=True):
            sums = Sums()
            if grad is not None:
                flat = grad.reshape(-1, grad.shape[-1])
                if ctx.needs_input_grad[1] and into is None:
                    into = flat.new_empty(len(flat), width)
                sums = _backward(together, product, flat, inputs, low, held, into, more)
                more = True
            of_weights += [None, None, *sums.of(held)]
        return None, None if into is None else into.view(ctx.shape), *of_weights


def _backward(
    together: Together,
    product: Product,
    grad: Tensor,
    inputs: Tensor | None,
    low: Tensor | None,
    weights: Weights,
    into: Tensor | None,
    more: bool,
) -> Sums:
    """One module's: its adapter's gradients; that of its input is put into or, with `more`, added to `into`."""
    sums = Sums()
    if inputs is None or low is None:
        if into is not None:
            into.addmm_(grad, weights.weight, beta=int(more))
        return sums
    flat = inputs.reshape(-1, inputs.shape[-1])
    for rows in together.tiles(product, len(grad)):
        given = grad[rows], flat[rows], low[rows], weights
        sums.add(product.backward(*given, None if into is None else into[rows], more))
    return sums
