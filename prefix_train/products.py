"""The product of rows with a linear module's frozen weight and with its adapter, and its backward, written out.

    x W^T (+ bias) + s (m * x) A^T B^T

m: the mask of the adapter's dropout, made again where it is needed; s: the adapter's scaling over the share that the
mask keeps. Autograd would give each factor, product and sum a pass over memory of its own, forward and backward: here
factors stand in the products, and sums are added to where they belong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from prefix_train import counted
from prefix_train.dropout import IN_REGISTERS, SeededDropout


class Weights(NamedTuple):
    """[out, in], [out], [rank, in] and [out, rank]; frozen the first two."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None


class Product:
    """Of one module that `knows` says yes to. dropout: its adapter's, where it has one that drops."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.base: Any = getattr(module, "base_layer", module)
        self.name: str | None = next(iter(module.lora_A)) if isinstance(module, LoraLinear) else None
        held = module.lora_dropout[self.name] if self.name is not None else None
        self.dropout = held if isinstance(held, SeededDropout) else None

    def weights(self) -> Weights:
        """What the module holds at this moment: the copies in the computing dtype, or what sharding has gathered."""
        a = b = None
        if self.name is not None:
            a, b = self.module.lora_A[self.name].weight, self.module.lora_B[self.name].weight
        return Weights(self.base.weight, self.base.bias, a, b)

    def ready(self, x: Tensor) -> Weights | None:
        """What the module holds, where what is written here computes what it would: frozen, one dtype, its one adapter
        switched on. Else None."""
        found = self.weights()
        weight, bias, _, _ = found
        if weight.requires_grad or (bias is not None and bias.requires_grad):
            return None
        if any(one is not None and one.dtype != x.dtype for one in found):
            return None
        off: bool = self.name is not None and (
            self.module.disable_adapters or self.module.merged or list(self.module.active_adapters) != [self.name]
        )
        return None if off else found

    def forward(self, x: Tensor, weights: Weights, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """[n, in] -> [n, out], and the rank-wide product [n, rank] that backward wants. Without a graph."""
        weight, bias, a, b = weights
        out = torch.mm(x, weight.mT, out=out) if bias is None else torch.addmm(bias, x, weight.mT, out=out)
        if a is None or b is None:
            return out, None
        low = self._low(x, a)
        return out.addmm_(low, b.mT, alpha=self._scale()), low

    def low(self, x: Tensor, weights: Weights) -> Tensor | None:
        """The second that `forward` gives, by itself."""
        return None if weights.a is None else self._low(x, weights.a)

    def backward(
        self, grad: Tensor, x: Tensor, low: Tensor | None, weights: Weights, into: Tensor | None, more: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """Gradients of the adapter, [rank, in] and [out, rank], where there is one; that of x is put into `into`.

        grad: [n, out]. low: what forward gave; None: made again. more: add to what is in `into`. The adapter's part is
        put there first: the large product adds to it as it writes, which costs next to nothing.
        """
        weight, _, a, b = weights
        found = None
        if a is not None and b is not None:
            low = self._low(x, a) if low is None else low
            scale = self._scale()
            found = self._back(_scaled(grad, b, scale), x, a, into, more), _scaled(grad.mT, low, scale)
            more = True
        if into is not None:
            into.addmm_(grad, weight, beta=int(more))
        return found

    def _low(self, x: Tensor, a: Tensor) -> Tensor:
        """[n, rank], of what dropout leaves of x."""
        if (draw := self._in_registers(x, a)) is not None:
            return counted.down(x, a, draw)
        keep = self._keep(x)
        return (x if keep is None else x * keep) @ a.mT

    def _back(self, up: Tensor, x: Tensor, a: Tensor, into: Tensor | None, more: bool) -> Tensor:
        """Gradient of a; that of x through it is put into `into`. up: [n, rank], that of the rank-wide product."""
        if (draw := self._in_registers(x, a)) is not None:
            return counted.back(up, x, a, draw, into, more)
        keep = self._keep(x)
        if into is not None and keep is None:
            into.addmm_(up, a, beta=int(more))
        elif into is not None and keep is not None:
            into.addcmul_(up @ a, keep) if more else torch.mul(up @ a, keep, out=into)
        return up.mT @ (x if keep is None else x * keep)

    @property
    def _drops(self) -> bool:
        return self.dropout is not None and self.dropout.training and self.dropout.p > 0

    def _in_registers(self, x: Tensor, a: Tensor) -> counted.Draw | None:
        """What the mask is drawn from, where kernels draw it themselves."""
        if self.dropout is None or not self._drops or not self.dropout.counted or not counted.in_registers(x, a):
            return None
        self.dropout.made.add(IN_REGISTERS)
        return self.dropout.drawn()

    def _keep(self, x: Tensor) -> Tensor | None:
        return None if self.dropout is None else self.dropout.keep(x)

    def _scale(self) -> float:
        """Of the adapter, and of the entries that stay."""
        scaling = float(self.module.scaling[self.name])
        return scaling / (1 - self.dropout.dropped) if self.dropout is not None and self._drops else scaling


def ready(products: Sequence[Product], x: Tensor) -> list[Tensor | None] | None:
    """What all of these modules hold, in a row (see `several`); None where one is not `Product.ready`."""
    tensors: list[Tensor | None] = []
    for product in products:
        found = product.ready(x)
        if found is None:
            return None
        tensors += found
    return tensors


def several(tensors: Sequence[Tensor]) -> list[Weights]:
    """What `Product.weights` gave for each of several modules, from all of it in a row."""
    size = len(Weights._fields)
    return [Weights(*tensors[start : start + size]) for start in range(0, len(tensors), size)]


def _scaled(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """x @ y, rounded and then scaled. A power of two changes no digit: the product is given it then."""
    if math.frexp(scale)[0] == 0.5:
        return torch.addmm(x.new_empty(()), x, y, beta=0, alpha=scale)
    return (x @ y).mul_(scale)


def rows(tiles: Sequence[Tensor | None]) -> Tensor | None:
    """[n, rank] of all tiles, out of what `Product.forward` gave for each; None without an adapter."""
    there = [tile for tile in tiles if tile is not None]
    return torch.cat(there) if len(there) > 1 else next(iter(there), None)


def unread(inputs: Tensor, width: int) -> Tensor:
    """In place of [..., width] that nothing will read: NaN, which shows should anything read it after all."""
    return inputs.new_full((), float("nan")).expand(*inputs.shape[:-1], width)


def knows(module: Any) -> bool:
    """Is it a plain linear module, bare or with one plain LoRA adapter?"""
    if type(module) is nn.Linear:
        return True
    if type(module) is not LoraLinear or type(module.base_layer) is not nn.Linear or module.fan_in_fan_out:
        return False
    (name, *others) = module.lora_A
    plain = isinstance(module.lora_dropout[name], SeededDropout | nn.Identity) and module.lora_B[name].bias is None
    return bool(plain and not others and not module.lora_variant)
