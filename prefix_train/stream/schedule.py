"""Which slot holds which unit (a block, a tile of the head), decided from the order of visits alone. No torch.

The order is known beforehand: up through all blocks, then down. A slot is given away only to a unit that is needed
before the one that it holds is needed again, so the way down begins with what is still there, and so does the next way
up. No decision depends on how fast anything was: what is read in a run can be counted before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Load(NamedTuple):
    """Bring a unit into a slot."""

    slot: int
    unit: int


class Schedule:
    """The contents of `slots` slots from visit to visit. resident: units that are always there, in no slot."""

    def __init__(self, slots: int, resident: Iterable[int] = ()) -> None:
        self.held: list[int | None] = [None] * slots
        self.resident = frozenset(resident)
        self.visiting: int | None = None
        self._coming: list[int] = []

    def begin(self, order: Sequence[int], then: Sequence[int] = ()) -> list[Load]:
        """Visits are made in this `order`, and probably `then` in that one. What to load now."""
        if self.visiting is not None:
            raise RuntimeError(f"unit {self.visiting} is still visited")
        self._coming = [*order, *then]
        return self._loads()

    def enter(self, unit: int) -> int | None:
        """A visit begins; the slot that the unit is in, none if it is resident."""
        if self.visiting is not None or not self._coming or self._coming[0] != unit:
            raise RuntimeError(f"unit {unit} is visited out of order")
        self.visiting = self._coming.pop(0)
        return None if unit in self.resident else self.held.index(unit)

    def leave(self) -> list[Load]:
        """The visit is over. What to load now."""
        self.visiting = None
        return self._loads()

    def _loads(self) -> list[Load]:
        found = []
        while (load := self._next_load()) is not None:
            self.held[load.slot] = load.unit
            found.append(load)
        return found

    def _next_load(self) -> Load | None:
        """The first unit that will be needed and is not there, in the slot whose unit is needed last, if later."""
        here = self.resident.union(unit for unit in self.held if unit is not None)
        wanted = next((place for place, unit in enumerate(self._coming) if unit not in here), None)
        if wanted is None:
            return None
        needed = [self._next_use(unit) for unit in self.held]
        slot = max(range(len(self.held)), key=lambda slot: (needed[slot], -slot))
        return Load(slot, self._coming[wanted]) if needed[slot] > wanted else None

    def _next_use(self, unit: int | None) -> float:
        return self._coming.index(unit) if unit in self._coming else float("inf")


def walk(blocks: int, lowest: int | None) -> list[int]:
    """Visits of one pass: up through all blocks, and down to `lowest`; none: no backward."""
    up = list(range(blocks))
    return up if lowest is None else [*up, *reversed(range(lowest, blocks))]


def reads(blocks: int, lowest: int | None, slots: int, resident: int, passes: int) -> list[int]:
    """Blocks that are read in each of `passes` equal passes; the first one starts with nothing but residents."""
    schedule = Schedule(slots, resident_blocks(blocks, resident))
    counts = []
    for _ in range(passes):
        order = walk(blocks, lowest)
        count = len(schedule.begin(order, walk(blocks, None)))
        for unit in order:
            schedule.enter(unit)
            count += len(schedule.leave())
        counts.append(count)
    return counts


def resident_blocks(blocks: int, count: int) -> range:
    """Which blocks stay: the last, with which the way down begins."""
    return range(blocks - min(count, blocks), blocks)
