"""A stand-in for CUDA graphs on the CPU: what is recorded is done again on the same memory, without its Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prefix_train.stream import frozen

WAITS = frozenset(
    {"aten::_local_scalar_dense", "aten::lift_fresh", "aten::nonzero", "aten::equal", "aten::item", "aten::is_nonzero"}
)
"""Operations for which host and device would wait for each other: none may be recorded."""


class Tape(TorchDispatchMode):
    """Records the operations of torch, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any, list[Tensor], list[bool]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(one, frozen.Packed) for one in tree_leaves((args, kwargs))):
            with self:
                return frozen.Packed.__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name in WAITS:
            raise RuntimeError(f"{func}: host and device would wait for each other")
        found = func(*args, **kwargs)
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        outs = [one for one in tree_leaves(found) if isinstance(one, Tensor)]
        fresh = [one.untyped_storage()._cdata not in given for one in outs]
        if any(fresh) or not func.is_view:  # `to` and `reshape` say that they are views, and may be none
            self.done.append((func, args, kwargs, outs, fresh))
        return found

    def play(self) -> None:
        """Do all of it again: what was made anew is put where it was then."""
        with torch.no_grad():
            for func, args, kwargs, outs, fresh in self.done:
                found = [one for one in tree_leaves(func(*args, **kwargs)) if isinstance(one, Tensor)]
                for old, new, anew in zip(outs, found, fresh, strict=True):
                    if anew:
                        old.copy_(new)


class Recorder:
    """Makes tapes. tapes: so far; plays: of all of them together; rooms: how often room was made."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.plays = self.rooms = 0

    def make_room(self) -> None:
        """See `graphs.Recorder`."""
        self.rooms += 1

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `graphs.Recorder`."""
        tape = Tape()
        with tape:
            run()
        self.tapes.append(tape)

        def play() -> None:
            self.plays += 1
            tape.play()

        return play
