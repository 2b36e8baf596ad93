"""Slots of device memory that the store's bytes pass through: reading, copying and computing at the same time.

Threads read pieces of a file into pinned memory and have them copied on streams of their own; the stream that computes
waits for a block's pieces when it is visited. What was last computed with a slot is over before anything is written to
it: copies wait for the event that ended that visit. On a CPU the slots are plain memory, and threads read into them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from prefix_train.pinned import Pinned
from prefix_train.stream.manifest import ALIGNMENT, BlockFile
from prefix_train.stream.schedule import Load, Schedule
from prefix_train.stream.store import Store

PIECE = 32 << 20
"""Bytes that one thread reads, and one copy moves, at a time: each piece costs the interpreter some time, of which the
computing thread has to have nearly all."""


@dataclass(frozen=True)
class Unit:
    """Bytes of a file that are brought to the device together."""

    block: BlockFile
    offset: int
    nbytes: int

    @classmethod
    def whole(cls, block: BlockFile) -> Unit:
        """All of a file."""
        return cls(block, 0, block.nbytes)


class Source:
    """Bytes of units on the host: read from the store's files, or from pinned copies of them.

    Nothing is allocated once it is made: files are read into pinned memory that each lane has, pinned copies are sent
    whole by the thread that asks for them.
    """

    def __init__(self, store: Store, device: torch.device, readers: int, pinned: bool = False) -> None:
        self.store, self.device = store, device
        self._pinned: dict[str, Pinned] | None = {} if pinned and device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(readers, "stream-reader")
        self._lanes: list[_Lane] = []
        self._free: SimpleQueue[_Lane] = SimpleQueue()
        if device.type == "cuda":
            self._lanes = [_Lane(device, 0)] if pinned else [_Lane(device, PIECE) for _ in range(2 * readers)]
            for lane in self._lanes:
                self._free.put(lane)

    def bring(self, unit: Unit, into: Tensor, after: Any) -> list[Future[Any]]:
        """Begin to fill `into`, uint8 on the device, behind the event `after`; each future has a piece's own event."""
        if self._pinned is not None:
            whole = self._pinned[unit.block.name].tensor[unit.offset : unit.offset + unit.nbytes]
            sent: Future[Any] = Future()
            sent.set_result(self._lanes[0].move(whole, into[: unit.nbytes], after))
            return [sent]
        return [
            self._pool.submit(self._move, unit, start, into[start : min(start + PIECE, unit.nbytes)], after)
            for start in range(0, unit.nbytes, PIECE)
        ]

    def writes_to(self, memory: Tensor) -> None:
        """Copies go to `memory`: once nobody has it any more, others get it when they are over, not before."""
        for lane in self._lanes:
            memory.record_stream(lane.stream)

    def close(self) -> None:
        """Let the threads end."""
        self._pool.shutdown(cancel_futures=True)

    def pin(self, units: Sequence[Unit]) -> None:
        """Keep the units' files in pinned memory, if that was asked for."""
        if self._pinned is not None:
            list(self._pool.map(self._pin, {unit.block.name: unit for unit in units}.values()))

    def _pin(self, unit: Unit) -> None:
        assert self._pinned is not None
        if unit.block.name not in self._pinned:
            # torch's allocator would round it up to a power of two; registered as one, for units begin anywhere in it
            whole = Pinned(unit.block.nbytes, unit.block.nbytes)
            self.store.read_into(unit.block, whole.tensor)
            self._pinned[unit.block.name] = whole

    def _move(self, unit: Unit, start: int, into: Tensor, after: Any) -> Any:
        if self.device.type != "cuda":
            self.store.read_into(unit.block, into, unit.offset + start)
            return None
        lane = self._free.get()
        try:
            staged = lane.staging(len(into))
            self.store.read_into(unit.block, staged, unit.offset + start)
            return lane.move(staged, into, after)
        finally:
            self._free.put(lane)


class _Lane:
    """A piece's way to a CUDA device: pinned memory and a stream. Threads sleep while they wait for a copy's end."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: Any = None

    def staging(self, nbytes: int) -> Tensor:
        """Pinned memory that nothing is copied out of any more."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._memory[:nbytes]

    def move(self, source: Tensor, into: Tensor, after: Any) -> Any:
        """Begin the copy; the event at its end."""
        with torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            into.copy_(source, non_blocking=True)
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record(self.stream)
        return self._copied


@dataclass
class Figures:
    """What a ring did. reads: units brought to the device, nbytes: theirs. visits: units computed with. waited_s: time
    in which the host waited for bytes (on CUDA: for them to be on their way)."""

    reads: int = 0
    nbytes: int = 0
    visits: int = 0
    waited_s: float = 0.0

    def since(self, before: Figures) -> Figures:
        """What was done after `before`."""
        return Figures(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


class Ring:
    """`slots` slots for `units`, and memory of their own for the resident ones. Filled in the order of `Schedule`."""

    def __init__(self, source: Source, units: Sequence[Unit], slots: int, resident: Sequence[int] = ()) -> None:
        self.figures = Figures()
        self.units = units
        self._source = source
        self._schedule = Schedule(slots, resident)
        passing = [unit.nbytes for place, unit in enumerate(units) if place not in self._schedule.resident]
        device, most = source.device, max(passing, default=0)
        self._slots = [aligned_empty(most, device) for _ in range(slots if passing else 0)]
        self._after: list[Any] = [self._now() for _ in self._slots]
        self._coming: list[list[Future[Any]]] = [[] for _ in self._slots]
        source.pin(units)
        self._resident = {place: aligned_empty(units[place].nbytes, device) for place in resident}
        for memory in (*self._slots, *self._resident.values()):
            source.writes_to(memory)
        for place, memory in self._resident.items():
            self._settle(source.bring(units[place], memory, self._now()))

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        return self._source.device

    @property
    def slots(self) -> Sequence[Tensor]:
        """uint8, the memory that units pass through."""
        return self._slots

    @property
    def stay(self) -> Sequence[Tensor]:
        """uint8, the memory of resident units."""
        return list(self._resident.values())

    @property
    def passing(self) -> list[int]:
        """Units that are not resident."""
        return [place for place in range(len(self.units)) if place not in self._resident]

    @property
    def held_bytes(self) -> int:
        """Device memory of slots and residents."""
        return sum(memory.nbytes for memory in (*self._slots, *self._resident.values()))

    def begin(self, order: Sequence[int], then: Sequence[int] = ()) -> None:
        """Visits come in this `order`, and probably `then` in that one: loading begins."""
        self._load(self._schedule.begin(order, then))

    @contextmanager
    def visit(self, place: int) -> Iterator[Tensor]:
        """uint8: the bytes of the unit, on the device, which are there until the block ends."""
        slot = self._schedule.enter(place)
        self.figures.visits += 1
        if slot is None:
            memory = self._resident[place]
        else:
            memory = self._slots[slot]
            self._settle(self._coming[slot])
        try:
            yield memory[: self.units[place].nbytes]
        finally:
            if slot is not None:
                self._after[slot] = self._now()
            self._load(self._schedule.leave())

    def _load(self, loads: Sequence[Load]) -> None:
        for load in loads:
            unit = self.units[load.unit]
            if self._coming[load.slot]:  # of a pass that was broken off: still being written to
                self._settle(self._coming[load.slot])
                self._after[load.slot] = self._now()
            self._coming[load.slot] = self._source.bring(unit, self._slots[load.slot], self._after[load.slot])
            self.figures.reads += 1
            self.figures.nbytes += unit.nbytes

    def _settle(self, pieces: list[Future[Any]]) -> None:
        """Have computing wait for these pieces."""
        began = time.monotonic()
        for piece in pieces:
            event = piece.result()
            if event is not None:
                torch.cuda.current_stream(self._source.device).wait_event(event)
        pieces.clear()
        self.figures.waited_s += time.monotonic() - began

    def _now(self) -> Any:
        """An event behind all computing so far; none on a CPU, where computing is over when the host goes on."""
        if self._source.device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._source.device))
        return event


def aligned_empty(nbytes: int, device: torch.device) -> Tensor:
    """uint8 [nbytes], beginning at a multiple of ALIGNMENT bytes, as allocators of torch give them."""
    memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    if memory.data_ptr() % ALIGNMENT:
        raise RuntimeError(f"{device}: memory is not aligned to {ALIGNMENT} bytes")
    return memory
