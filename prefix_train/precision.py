"""Float32 masters of what is trained, computed with in the model's own dtype.

Sharded modules leave the cast to FSDP2's mixed precision. `Copies` does the same where nothing is sharded: PEFT would
otherwise cast an adapter's input up to the adapter's float32 and double the largest tensors of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


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
        self._places = [
            (owner, name, parameter)
            for owner in module.modules()
            if id(owner) not in skipped
            for name, parameter in owner._parameters.items()
            if parameter is not None and parameter.requires_grad and parameter.dtype != dtype
        ]

    def __enter__(self) -> None:
        made: dict[int, Tensor] = {}
        for owner, name, parameter in self._places:
            copy = made.setdefault(id(parameter), parameter.to(self._dtype))
            owner._parameters[name] = copy  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        for owner, name, parameter in self._places:
            owner._parameters[name] = parameter
