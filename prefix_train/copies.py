"""Copies between a device's memory and the host's, beside what the device computes.

One rule keeps memory whole without any wait of the host. A copy begins behind all that the device was asked for so far
(what wrote its source, and what last read the memory of its target), and both of its memories are held until the
device's computing has been told to wait for its end. Copies of one way follow each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Way = Literal["out", "back"]
"""To the host, or back to the device."""


class Copier(ABC):
    """Makes copies beside computing. pinned: host memory must be pinned for it."""

    pinned: bool

    @abstractmethod
    def start(self, way: Way, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
        """Ask for each source to be copied into its target; the ticket to wait with."""

    @abstractmethod
    def wait(self, ticket: Any) -> None:
        """Whatever is computed from now on comes after that copy."""

    @abstractmethod
    def spent(self) -> tuple[float, float]:
        """Seconds that copies took, and that computing stood still for them, since this was last asked; 0 if unknown.

        Waits for the last copy that was waited for.
        """


class Copy:
    """One copy, whose memories are held until it is waited for; one that is dropped is waited for as well."""

    def __init__(self, copier: Copier, way: Way, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self._copier = copier
        self._ticket = copier.start(way, targets, sources)
        self._held: tuple[Sequence[Tensor], Sequence[Tensor]] | None = (targets, sources)

    def finish(self) -> None:
        """Have computing wait for the copy's end, once."""
        if self._held is not None:
            self._copier.wait(self._ticket)
            self._held = None

    def __del__(self) -> None:
        self.finish()


class LateCopier(Copier):
    """Without streams: each copy is made when it is waited for, the last moment at which a stream might make it."""

    pinned = False

    def __init__(self) -> None:
        self._asked: dict[Way, deque[_Asked]] = {"out": deque(), "back": deque()}

    def start(self, way: Way, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> _Asked:
        """Only remembers what to do."""
        asked = _Asked(way, targets, sources)
        self._asked[way].append(asked)
        return asked

    def wait(self, ticket: _Asked) -> None:
        """Make this copy and all before it."""
        while not ticket.made:
            self._asked[ticket.way].popleft().make()

    def spent(self) -> tuple[float, float]:
        """Unknown: nothing runs beside."""
        return 0.0, 0.0


class _Asked:
    def __init__(self, way: Way, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self.way, self.made = way, False
        self._pairs = list(zip(targets, sources, strict=True))

    def make(self) -> None:
        for target, source in self._pairs:
            target.copy_(source)
        self.made = True
        self._pairs.clear()


class CudaCopier(Copier):
    """One stream for each way, beside the stream that computes. Times are read from events."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        ways: tuple[Way, ...] = ("out", "back")
        self._streams = {way: torch.cuda.Stream(device) for way in ways}  # type: ignore[no-untyped-call]
        self._timed: deque[_Timed] = deque()
        self._copying_s = self._stalled_s = 0.0

    def start(self, way: Way, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> _Timed:
        """Never waits. The pinned side must stay allocated: only then is the copy asynchronous."""
        side = self._streams[way]
        ticket = _Timed(torch.cuda.current_stream(self._device))
        side.wait_stream(ticket.computing)
        with torch.cuda.stream(side):
            ticket.began.record(side)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            ticket.ended.record(side)
        return ticket

    def wait(self, ticket: _Timed) -> None:
        """The stream that computed when the copy was asked for waits for it."""
        ticket.stopped.record(ticket.computing)
        ticket.computing.wait_event(ticket.ended)
        ticket.resumed.record(ticket.computing)
        self._timed.append(ticket)
        while self._timed and self._timed[0].resumed.query():  # type: ignore[no-untyped-call]
            self._count(self._timed.popleft())

    def spent(self) -> tuple[float, float]:
        """From the events of all copies that were waited for."""
        while self._timed:
            self._timed[0].resumed.synchronize()
            self._count(self._timed.popleft())
        spent = self._copying_s, self._stalled_s
        self._copying_s = self._stalled_s = 0.0
        return spent

    def _count(self, done: _Timed) -> None:
        self._copying_s += done.began.elapsed_time(done.ended) / 1e3
        self._stalled_s += done.stopped.elapsed_time(done.resumed) / 1e3


class _Timed:
    """began, ended: of the copy. stopped, resumed: of the computing that waited for it."""

    def __init__(self, computing: torch.cuda.Stream) -> None:
        self.computing = computing
        self.began, self.ended, self.stopped, self.resumed = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(4)
        )


def copier_for(device: torch.device) -> Copier:
    """What copies to and from `device`."""
    return CudaCopier(device) if device.type == "cuda" else LateCopier()
