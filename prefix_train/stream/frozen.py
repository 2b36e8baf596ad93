"""A block's frozen parameters, put into its modules for the time of a visit: views of the slot that the block is in.

A plain tensor is a view. A quantised one is dequantised by each operation that reads it and is gone after it, so that
no more than one matrix of a block exists in the model's dtype. Autograd keeps it as it is stored: what is computed, and
in which order, is to the bit what would be computed with the dequantised matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from prefix_train.stream.manifest import BlockFile, Stored
from prefix_train.stream.store import unpack

aten = torch.ops.aten

PEFT = ("base_layer", "original_module")
"""What PEFT inserts into the names of parameters that it leaves as they are."""

VIEWS = {
    aten.alias.default: False,
    aten.detach.default: False,
    aten.t.default: True,
    aten.transpose.int: True,
}
"""What can be done to a matrix without reading it, and whether it then lies on its side."""


class Packed(Tensor):
    """A frozen matrix as it is stored in `buffer`, the bytes of its block; operations get it dequantised.

    visit: has an element as long as these bytes are the block's; what reads the matrix later gets an error.
    """

    stored: Stored
    buffer: Tensor
    visit: list[bool]
    on_its_side: bool

    @staticmethod
    def __new__(cls, stored: Stored, buffer: Tensor, visit: list[bool], on_its_side: bool = False) -> Packed:
        """Of the stored tensor's shape and dtype, or of the transposed matrix's."""
        rows, columns = stored.shape
        shape, strides = ((columns, rows), (1, columns)) if on_its_side else ((rows, columns), (columns, 1))
        made: Packed = Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=stored.dtype, device=buffer.device
        )
        made.stored, made.buffer, made.visit, made.on_its_side = stored, buffer, visit, on_its_side
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def whole(self) -> Tensor:
        """Dequantised. Raises RuntimeError after the visit."""
        if not self.visit:
            raise RuntimeError(f"{self.stored.name} is read after the visit of its block, whose slot may be another's")
        found = unpack(self.stored, self.buffer)
        return found.t() if self.on_its_side else found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in VIEWS:
            matrix = args[0]
            return cls(matrix.stored, matrix.buffer, matrix.visit, matrix.on_its_side != VIEWS[func])
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        """Without reading it."""
        return f"Packed({self.stored.name}, {tuple(self.shape)}, {self.dtype})"


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, Packed) else value


class Frozen:
    """The frozen parameters of one decoder block, whose bytes `block` describes."""

    def __init__(self, layer: nn.Module, block: BlockFile) -> None:
        self._places = []
        for name, (owner, attribute) in frozen_places(layer).items():
            stored = block.by_name[name]
            away = nn.Parameter(torch.empty(stored.shape, dtype=stored.dtype, device="meta"), requires_grad=False)
            owner._parameters[attribute] = away
            self._places.append((owner, attribute, away, stored))

    @contextmanager
    def within(self, buffer: Tensor) -> Iterator[None]:
        """Parameters read as what `buffer`, uint8 on the computing device, holds; else they are on the meta device."""
        visit = [True]
        for owner, attribute, _, stored in self._places:
            found = unpack(stored, buffer) if stored.weights == "plain" else Packed(stored, buffer, visit)
            owner._parameters[attribute] = found  # type: ignore[assignment]
        try:
            yield
        finally:
            visit.clear()
            for owner, attribute, away, _ in self._places:
                owner._parameters[attribute] = away


def frozen_places(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Where each parameter is that is not trained, by its name in transformers: adapters are put around modules."""
    found = {}
    for prefix, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                path = [part for part in prefix.split(".") if part and part not in PEFT]
                found[".".join([*path, attribute])] = (owner, attribute)
    return found
