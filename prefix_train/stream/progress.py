"""What a long check is at, a line at a time, and how long the rest of it will take by what is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, overload

EVERY_S = 10.0
"""Least time between two lines about one part."""

Item = TypeVar("Item")


class Progress:
    """Of parts that come one after the other. work: of each part by its name, in any unit; say: prints a line."""

    def __init__(
        self, work: Mapping[str, float], say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._work, self._say, self._clock = work, say, clock
        self._parts = list(work)
        self._began = clock()
        self._part, self._told = -1, 0.0

    def part(self, items: Sequence[Item], what: str) -> Sequence[Item]:
        """Begin the next part. The items, of which it is told, as a loop goes over them, which it is at."""
        self._part += 1
        self._tell(0.0, f", {len(items)} {what}{'' if len(items) == 1 else 's'}")
        return _Watched(items, lambda done: self._reached(done, len(items), what))

    def _reached(self, done: int, of: int, what: str) -> None:
        if done and self._clock() - self._told >= EVERY_S:
            self._tell(done / of, f", {what} {done + 1} of {of}")

    def _tell(self, share: float, what: str) -> None:
        """share: of the part that is done."""
        self._told = self._clock()
        name = self._parts[self._part]
        work = list(self._work.values())
        done = sum(work[: self._part]) + share * work[self._part]
        left = (sum(work) - done) * (self._told - self._began) / done if done else None
        rest = "" if left is None else f"; about {timedelta(seconds=round(left))} left"
        self._say(f"{self._part + 1} of {len(work)}: {name}{what}{rest}")


class _Watched(Sequence[Item]):
    """A sequence that calls `reached` with an item's place each time a loop comes to it."""

    def __init__(self, items: Sequence[Item], reached: Callable[[int], None]) -> None:
        self._items, self._reached = items, reached

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, place: int) -> Item: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Item]: ...
    def __getitem__(self, place: Any) -> Any:
        return self._items[place]

    def __iter__(self) -> Iterator[Item]:
        for place, item in enumerate(self._items):
            self._reached(place)
            yield item
