"""A block's frozen parameters, put into its modules for the time of a visit: views of the slot that the block is in.

A plain tensor is a view. A quantised one is dequantised by each operation that reads it, into memory that all matrices
share, and is gone when the next one is read, so that no more than one matrix exists in the model's dtype. Autograd
keeps it as it is stored: what is computed, and in which order, is to the bit what would be computed with the
dequantised matrix. What a visit needs is made when a block is first in a slot, and found again at its next visit there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from prefix_train.stream import nf4
from prefix_train.stream.manifest import BlockFile, Stored
from prefix_train.stream.store import parts_of, unpack

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

PRODUCTS = frozenset({aten.mm.default, aten.mm.out, aten.addmm.default, aten.addmm.out, aten.addmm_.default})
"""What reads a matrix at once and returns nothing that lies in its memory."""


class Matrix:
    """A frozen matrix as it is stored in a block's bytes. parts: views of these.

    shared: memory that products get it in; one stream computes them all. visit: has an element as long as the bytes are
    the block's.
    """

    def __init__(self, stored: Stored, parts: nf4.Parts, shared: Tensor, visit: list[bool]) -> None:
        self.stored, self.parts, self.visit = stored, parts, visit
        self._shared = shared[: stored.elements].view(stored.shape)

    def whole(self, product: bool) -> Tensor:
        """Dequantised; for a `product` in the shared memory. Raises RuntimeError after the visit."""
        if not self.visit:
            raise RuntimeError(f"{self.stored.name} is read after the visit of its block, whose slot may be another's")
        return nf4.dequantise(self.parts, self._shared if product else torch.empty_like(self._shared))


class Packed(Tensor):
    """A matrix, or, on its side, the transposed one, that operations get dequantised."""

    matrix: Matrix
    on_its_side: bool
    turned: Packed | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, matrix: Matrix, on_its_side: bool = False) -> Packed:
        """Of the stored tensor's shape and dtype."""
        rows, columns = matrix.stored.shape
        shape, strides = ((columns, rows), (1, columns)) if on_its_side else ((rows, columns), (columns, 1))
        device = matrix.parts["packed"].device
        made: Packed = Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=matrix.stored.dtype, device=device
        )
        made.matrix, made.on_its_side, made.turned = matrix, on_its_side, None
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @property
    def mT(self) -> Packed:  # type: ignore[override]
        """The other way round; made once."""
        if self.turned is None:
            self.turned = Packed(self.matrix, not self.on_its_side)
        return self.turned

    def whole(self, product: bool = False) -> Tensor:
        """Dequantised, see `Matrix.whole`."""
        found = self.matrix.whole(product)
        return found.t() if self.on_its_side else found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in VIEWS:
            return cls(args[0].matrix, args[0].on_its_side != VIEWS[func])
        if func in PRODUCTS and sum(type(one) is cls for one in args) == 1:
            return func(*(one.whole(True) if type(one) is cls else one for one in args), **(kwargs or {}))
        return func(*tree_map(_whole, args), **tree_map(_whole, kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        """Without reading it."""
        return f"Packed({self.matrix.stored.name}, {tuple(self.shape)}, {self.dtype})"


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, Packed) else value


class Frozen:
    """The frozen parameters of one decoder block, whose bytes `block` describes. shared: see `shared_memory`."""

    def __init__(self, layer: nn.Module, block: BlockFile, shared: Tensor) -> None:
        self._shared = shared
        self._places = []
        self._visit: list[bool] = []
        self._held: dict[int, list[Tensor]] = {}
        for name, (owner, attribute) in frozen_places(layer).items():
            stored = block.by_name[name]
            away = nn.Parameter(torch.empty(stored.shape, dtype=stored.dtype, device="meta"), requires_grad=False)
            owner._parameters[attribute] = away
            self._places.append((owner, attribute, stored))

    @contextmanager
    def within(self, buffer: Tensor) -> Iterator[None]:
        """Parameters read as what `buffer`, uint8 on the computing device, holds; afterwards as before: outside of all
        visits they are on the meta device.

        buffer: stays this block's place as long as this object is there.
        """
        held = self._held.get(buffer.data_ptr())
        if held is None:
            held = self._held[buffer.data_ptr()] = [self._of(stored, buffer) for *_, stored in self._places]
        before = [owner._parameters[attribute] for owner, attribute, _ in self._places]
        self._visit.append(True)
        for (owner, attribute, _), found in zip(self._places, held, strict=True):
            owner._parameters[attribute] = found  # type: ignore[assignment]
        try:
            yield
        finally:
            self._visit.pop()
            for (owner, attribute, _), was in zip(self._places, before, strict=True):
                owner._parameters[attribute] = was

    def _of(self, stored: Stored, buffer: Tensor) -> Tensor:
        if stored.weights == "plain":
            return unpack(stored, buffer)
        return Packed(Matrix(stored, parts_of(stored, buffer), self._shared, self._visit))


def shared_memory(blocks: Sequence[BlockFile], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for the largest of the blocks' quantised matrices once it is dequantised; empty where there is none."""
    quantised = [stored.elements for block in blocks for stored in block.tensors if stored.weights == "nf4"]
    return torch.empty(max(quantised, default=0), dtype=dtype, device=device)


def frozen_places(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Where each parameter is that is not trained, by its name in transformers: adapters are put around modules."""
    found = {}
    for prefix, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                path = [part for part in prefix.split(".") if part and part not in PEFT]
                found[".".join([*path, attribute])] = (owner, attribute)
    return found
