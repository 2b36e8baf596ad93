"""Float32 masters of what is trained, computed with in the model's own dtype.

Sharded modules leave the cast to FSDP2's mixed precision. `Copies` does the same where nothing is sharded: PEFT would
otherwise cast an adapter's input up to the adapter's float32 and double the largest tensors of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def make_masters(model: nn.Module) -> None:
    """Turn every trainable parameter of lower precision into float32, in place; ties and names stay."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


class Copies:
    """Context in which the trainable parameters of `module` read as copies in `dtype`; gradients reach the masters.

    nested: modules below `module` that have contexts of their own. The copies belong to one pass through the context:
    a layer's recomputation makes new ones. Not reentrant.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, nested: Iterable[nn.Module] = ()) -> None:
        skipped = {id(child) for unit in nested for child in unit.modules()}
        self._dtype = dtype
        places = [
            (owner, name, parameter)
            for owner in module.modules()
            if id(owner) not in skipped
            for name, parameter in owner._parameters.items()
            if parameter is not None and parameter.requires_grad and parameter.dtype != dtype
        ]
        self._masters = list({id(parameter): parameter for *_, parameter in places}.values())
        index = {id(parameter): place for place, parameter in enumerate(self._masters)}
        self._places = [(owner, name, index[id(parameter)]) for owner, name, parameter in places]

    def __enter__(self) -> None:
        if not self._masters:
            return
        copies = _Cast.apply(self._dtype, *self._masters)  # type: ignore[no-untyped-call]
        for owner, name, place in self._places:
            owner._parameters[name] = copies[place]

    def __exit__(self, *_: object) -> None:
        for owner, name, place in self._places:
            owner._parameters[name] = self._masters[place]


class _Cast(Function):
    """Masters in another dtype, and their gradients in the masters': all of them at once, on CUDA in one kernel."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *masters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = masters[0].dtype
        return tuple(_copied(masters, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = iter(_copied([grad for grad in grads if grad is not None], ctx.dtype))
        return None, *(None if grad is None else next(found) for grad in grads)


def _copied(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    made = [torch.empty_like(one, dtype=dtype) for one in tensors]
    if made:
        torch._foreach_copy_(made, list(tensors))
    return made
