"""Counts the bytes of all tensors that are alive, operation by operation, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prefix_train.stream.frozen import Packed

MAPPED = (torch.ops.aten.from_file.default,)
"""What makes tensors that are no memory of the device's."""


class LiveBytes(TorchDispatchMode):
    """Within this context, `peak` is the most bytes at a time of storages that were made in it, `now` those alive.

    largest: what was alive at the peak, (bytes, shape, dtype, operation), largest first. What one operation makes and
    drops by itself is not seen; what dequantising makes is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.largest: list[tuple[int, tuple[int, ...], torch.dtype, str]] = []
        self._alive: dict[int, tuple[StorageWeakRef, int, Any]] = {}

    @property
    def now(self) -> int:
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        return sum(nbytes for _, nbytes, _ in self._alive.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(one, Packed) for one in tree_leaves((args, kwargs))):
            with self:  # what a packed matrix computes with counts as well
                return Packed.__torch_dispatch__(func, types, args, kwargs)
        found = func(*args, **kwargs)
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and not isinstance(one, Packed) and not one.is_meta:
                storage = one.untyped_storage()
                key, what = storage._cdata, (tuple(one.shape), one.dtype, str(func))
                if key not in self._alive or self._alive[key][0].expired():
                    nbytes = 0 if func in MAPPED else storage.nbytes()
                    self._alive[key] = (StorageWeakRef(storage), nbytes, what)
        now = self.now
        if now > self.peak:
            self.peak = now
            self.largest = sorted(
                ((nbytes, *what) for _, nbytes, what in self._alive.values()), key=lambda one: -one[0]
            )
        return found
