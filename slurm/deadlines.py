"""How long a rank may stay where it is, phase by phase, and how long it has been there. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from configs.schema import WatchConfig
from prefix_train.heartbeat import Beat

MIN_DURATIONS = 3
"""Updates that must have been measured before they set a deadline; until then `watch.first_update_s` holds."""


LAG_S = 3.0
"""A time between two polls that is longer by this than it should be is one in which the watcher was not let run."""


class Overdue(NamedTuple):
    """A rank that has been in one place for longer than its deadline."""

    beat: Beat
    age: float
    limit: float

    @property
    def sentence(self) -> str:
        """What is overdue, for people."""
        what = f"update {self.beat.update}" if timed_by_update(self.beat) else f"phase {self.beat.phase}"
        return f"{what} has taken {self.age:.1f} s, its deadline was {self.limit:.1f} s"


def percentile_99(durations: Sequence[float]) -> float:
    """The smallest of `durations` that at least 99% of them do not exceed."""
    ordered = sorted(durations)
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


def timed_by_update(beat: Beat) -> bool:
    """Whether the deadline runs from the beginning of the update, not of the phase."""
    return beat.update_clock is not None and beat.phase not in ("compile", "first_update")


def deadline(beat: Beat, watch: WatchConfig, durations: Sequence[float]) -> float:
    """Seconds that `beat`'s rank may spend where it is; `durations`: of the updates of all ranks in this life."""
    if timed_by_update(beat):
        if len(durations) < MIN_DURATIONS:
            return max(watch.floor_s, watch.first_update_s)
        return max(watch.floor_s, watch.factor * percentile_99(durations))
    return {
        "load": watch.load_s,
        "compile": watch.first_update_s,
        "first_update": watch.first_update_s,
        "save": watch.save_s,
        "evaluate": watch.evaluate_s,
        "done": watch.load_s,
    }.get(beat.phase, watch.first_update_s)


def is_warm(beat: Beat) -> bool:
    """Whether the rank is in an update, and has finished enough of them for these to be what is usual."""
    return timed_by_update(beat) and len(beat.durations) >= MIN_DURATIONS


class Pauses:
    """When a watcher was not let run: its node was overloaded, or the job suspended, and so were the ranks.

    `now`: whether the last time between two polls was one.
    """

    def __init__(self, poll_s: float) -> None:
        self.now = False
        self._poll_s = poll_s
        self._last: float | None = None
        self._found: list[tuple[float, float]] = []

    def tick(self, clock: float) -> None:
        """A poll begins, at CLOCK_MONOTONIC `clock`."""
        usual = self._poll_s + LAG_S
        self.now = self._last is not None and clock - self._last > usual
        if self.now and self._last is not None:
            self._found.append((self._last + self._poll_s, clock))
        self._last = clock

    def rest(self) -> None:
        """What has been done since the last poll took long by itself: that is no pause."""
        self._last = None

    def since(self, clock: float) -> float:
        """Seconds of pauses after `clock`."""
        return sum(max(0.0, end - max(begin, clock)) for begin, end in self._found)


def age(beat: Beat, host: str, clock: float, wall: float) -> float:
    """Seconds that the rank has spent there; on its own host by the monotonic clock, elsewhere by wall clocks."""
    return wall - beat.since if beat.host != host else clock - _begin(beat)


def overdue(
    beats: Iterable[Beat], watch: WatchConfig, host: str, clock: float, wall: float, pauses: Pauses | None = None
) -> list[Overdue]:
    """Ranks past their deadline, the longest over it first; `pauses` do not count."""
    beats = list(beats)
    durations = [seconds for beat in beats for seconds in beat.durations]
    paused = [pauses.since(_begin(beat)) if pauses and beat.host == host else 0.0 for beat in beats]
    found = [
        Overdue(beat, age(beat, host, clock, wall) - pause, deadline(beat, watch, durations))
        for beat, pause in zip(beats, paused, strict=True)
    ]
    return sorted((late for late in found if late.age > late.limit), key=lambda late: late.limit - late.age)


def _begin(beat: Beat) -> float:
    if timed_by_update(beat) and beat.update_clock is not None:
        return beat.update_clock
    return beat.since_clock
