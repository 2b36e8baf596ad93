"""How long a rank may stay where it is, phase by phase, and how long it has been there. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from configs.schema import WatchConfig
from prefix_train.heartbeat import Beat

MIN_DURATIONS = 3
"""Updates that must have been measured before they set a deadline; until then `watch.first_update_s` holds."""


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


def age(beat: Beat, host: str, clock: float, wall: float) -> float:
    """Seconds that the rank has spent there; on its own host by the monotonic clock, elsewhere by wall clocks."""
    if beat.host != host:
        return wall - beat.since
    if timed_by_update(beat) and beat.update_clock is not None:
        return clock - beat.update_clock
    return clock - beat.since_clock


def overdue(beats: Iterable[Beat], watch: WatchConfig, host: str, clock: float, wall: float) -> list[Overdue]:
    """Ranks past their deadline, the longest over it first."""
    beats = list(beats)
    durations = [seconds for beat in beats for seconds in beat.durations]
    found = [Overdue(beat, age(beat, host, clock, wall), deadline(beat, watch, durations)) for beat in beats]
    return sorted((late for late in found if late.age > late.limit), key=lambda late: late.limit - late.age)
