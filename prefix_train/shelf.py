"""What the forward of a layer leaves for its own recomputation, so that it need not be computed twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

_now = threading.local()

Waiting = Callable[[], Tensor]
"""Gives back a tensor that waits somewhere."""


def stay(tensor: Tensor) -> Waiting:
    """It waits where it is."""
    return lambda: tensor


class Shelf:
    """Of one forward of one layer. wait: where the large tensor waits."""

    def __init__(self, wait: Callable[[Tensor], Waiting]) -> None:
        self._wait = wait
        self._kept: tuple[Waiting, Tensor] | None = None

    def put(self, large: Tensor, small: Tensor) -> None:
        """In the forward: `large`, contiguous, waits where it was said, `small` stays."""
        self._kept = self._wait(large), small

    def take(self) -> tuple[Tensor, Tensor] | None:
        """What was put there; None in the forward itself. A graph that is kept takes several times."""
        if self._kept is None:
            return None
        waiting, small = self._kept
        return waiting(), small


@contextmanager
def use(shelf: Shelf | None) -> Iterator[None]:
    """Within this context `current` is `shelf`, for this thread."""
    before, _now.shelf = current(), shelf
    try:
        yield
    finally:
        _now.shelf = before


def current() -> Shelf | None:
    """The shelf of the layer that this thread computes; None where it keeps nothing."""
    found: Shelf | None = getattr(_now, "shelf", None)
    return found
