"""Memory at addresses that stay: what launches that are recorded once (`graphs`) read and write.

Blocks that are alike share it. A block's adapters are copied there before its launches are repeated, and their
gradients from there afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from prefix_train import dropout
from prefix_train.dropout import SeededDropout
from prefix_train.stream.manifest import ALIGNMENT, BlockFile

OWN = frozenset({"layer_idx", "training"})
"""Attributes of modules that differ from block to block, or from call to call, and decide nothing."""

PLAIN = (bool, int, float, str, type(None))


class Flat:
    """Tensors of these shapes in one piece of memory, each aligned as an allocator would align it."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        step = ALIGNMENT // dtype.itemsize
        starts, end = [], 0
        for shape in shapes:
            starts.append(end)
            end += -(-prod(shape) // step) * step
        self.whole = torch.zeros(end, dtype=dtype, device=device)
        self.parts = [
            self.whole[start : start + prod(shape)].view(shape) for start, shape in zip(starts, shapes, strict=True)
        ]


class Adapters:
    """A block's trained parameters: the masters, and where they are in its modules."""

    def __init__(self, layer: nn.Module) -> None:
        self.masters: list[nn.Parameter] = []
        self._places: list[tuple[nn.Module, str, int]] = []
        self._grads: Flat | None = None
        index: dict[int, int] = {}
        for owner in layer.modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    if id(parameter) not in index:
                        index[id(parameter)] = len(self.masters)
                        self.masters.append(parameter)
                    self._places.append((owner, name, index[id(parameter)]))

    @contextmanager
    def reading(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """The block computes with `tensors` instead of the masters."""
        for owner, name, place in self._places:
            owner._parameters[name] = tensors[place]  # type: ignore[assignment]
        try:
            yield
        finally:
            for owner, name, place in self._places:
                owner._parameters[name] = self.masters[place]

    def add(self, found: Flat) -> None:
        """Add these gradients to the masters'."""
        if any(master.grad is not None for master in self.masters):
            there = [master.grad for master in self.masters if master.grad is not None]
            torch._foreach_add_(there, found.parts)
            return
        if self._grads is None:
            self._grads = Flat([tuple(master.shape) for master in self.masters], found.whole.dtype, found.whole.device)
        self._grads.whole.copy_(found.whole)
        for master, grad in zip(self.masters, self._grads.parts, strict=True):
            master.grad = grad


class Masks:
    """A block's dropouts, whose masks are counted."""

    def __init__(self, layer: nn.Module) -> None:
        self.dropouts = [one for one in dropout.find(layer) if one.p > 0]

    def seeds(self, draw: str | None) -> list[int]:
        """In (run, update, pack)."""
        assert draw is not None or not self.dropouts
        return [one.seed(draw or "") for one in self.dropouts]

    @contextmanager
    def finding(self, seeds: Sequence[Tensor]) -> Iterator[None]:
        """Each finds its seed there."""
        for one, seed in zip(self.dropouts, seeds, strict=True):
            one.held = seed
        try:
            yield
        finally:
            for one in self.dropouts:
                one.held = None


class Kind:
    """Blocks that are alike. weights: their adapters' in the dtype that is computed in; grads: in the masters'. seeds:
    int64, of their masks."""

    def __init__(self, adapters: Adapters, masks: Masks, dtype: torch.dtype, device: torch.device) -> None:
        shapes = [tuple(master.shape) for master in adapters.masters]
        masters = adapters.masters[0].dtype if adapters.masters else dtype
        self.weights, self.grads = Flat(shapes, dtype, device), Flat(shapes, masters, device)
        self.seeds = torch.zeros(len(masks.dropouts), dtype=torch.int64, device=device)
        self.each_seed = self.seeds.unbind()

    def take(self, adapters: Adapters, seeds: Tensor) -> None:
        """Let `weights` be this block's, and `seeds` these."""
        if len(seeds):
            self.seeds.copy_(seeds)
        if adapters.masters:
            with torch.no_grad():
                torch._foreach_copy_(self.weights.parts, list[Tensor](adapters.masters))


class Call:
    """What blocks are given besides hidden states. leaves: of `spec`; its tensors are copied."""

    def __init__(self, leaves: Sequence[Any], spec: TreeSpec) -> None:
        self._leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._given = list(leaves)
        self.args, self.kwargs = tree_unflatten(self._leaves, spec)

    def fill(self, leaves: Sequence[Any]) -> None:
        """Let the tensors hold what those of `leaves` do, which nobody writes to."""
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf is not self._given[place]:
                self._leaves[place].copy_(leaf)
                self._given[place] = leaf

    def release(self) -> None:
        """Keep nobody's tensors."""
        self._given = [None] * len(self._given)


class States:
    """Hidden states of up to `most` positions: a block's input, what comes of it, and the gradient of its output."""

    def __init__(self, most: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._whole = [torch.empty(most * width, dtype=dtype, device=device) for _ in range(3)]
        self._width = width

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self._whole[0].device

    def of(self, positions: int) -> tuple[Tensor, Tensor, Tensor]:
        """Input, result and gradient, [1, T, D] each. Raises RuntimeError where there is no room."""
        elements = positions * self._width
        if elements > self._whole[0].numel():
            most = self._whole[0].numel() // self._width
            raise RuntimeError(f"a pack of {positions:,} positions, and launches are recorded for up to {most:,}")
        hidden, out, grad = (whole[:elements].view(1, positions, -1) for whole in self._whole)
        return hidden, out, grad


def structure(layer: nn.Module, block: BlockFile) -> tuple[Any, ...]:
    """What two blocks must have in common to launch the same: modules with their plain attributes, tensors, and where
    these lie in the block's bytes. A buffer is of its block alone."""
    found: list[Any] = []
    for name, module in layer.named_modules():
        values = {key: repr(value) for key, value in vars(module).items() if key not in OWN and _is_plain(value)}
        if isinstance(module, SeededDropout):
            values = {"p": repr(module.p), "counted": repr(module.counted)}
        tensors = [
            (key, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        buffers = [(key, buffer.data_ptr()) for key, buffer in module._buffers.items() if buffer is not None]
        found.append((name, type(module), tuple(sorted(values.items())), tuple(tensors), tuple(buffers)))
    places = [
        (stored.name, part, stored.shape, stored.dtype, spec.offset, spec.nbytes) for stored, part, spec in block.parts
    ]
    return tuple(found), tuple(places)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, PLAIN) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))
