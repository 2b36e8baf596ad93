"""When each life of a run began and ended, and when it hung: what the time line shows.

A life's own file does not say when, so the times of files do: where those cannot be right (a folder that was copied
without them), lives are shown in their order alone, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from configs import runfolder
from prefix_train.heartbeat import Beat, End
from prefix_train.results.records import Alarm, Ending, Life, Preflight, Reader, Verdict

CLOCKS_S = 60.0
"""How far the clocks of nodes and of the file server may be apart."""
ENDED_WELL = (0, runfolder.STOPPED)


@dataclass(frozen=True)
class Hang:
    """hangs/<number>."""

    number: int
    alarm: Alarm | None
    verdict: Verdict | None

    @property
    def attempt(self) -> int | None:
        """The life that it belongs to, where one of its files could be read."""
        return next((one.attempt for one in (self.alarm, self.verdict) if one is not None), None)


@dataclass(frozen=True)
class Span:
    """One life. began, ended: seconds since 1970, none where nothing says so."""

    attempt: int
    life: Life | None
    began: float | None
    ended: float | None
    cause: str | None
    """How it ended; none: it has not, or nobody could say."""


def hangs(reader: Reader) -> list[Hang]:
    """All hangs, oldest first."""
    found = []
    for number in reader.numbered(runfolder.HANGS):
        folder = f"{runfolder.HANGS}/{number}"
        alarm = reader.json(f"{folder}/alarm.json", Alarm, f"{folder}/alarm.json: not there")
        verdict = reader.json(f"{folder}/verdict.json", Verdict, f"{folder}/verdict.json: not judged yet")
        found.append(Hang(number, alarm, verdict))
    return found


def spans(
    reader: Reader,
    attempt: int,
    reports: Mapping[int, Preflight | None],
    found_hangs: Sequence[Hang],
    ends: Sequence[End],
    complete: bool,
    ending: Ending | None = None,
) -> list[Span]:
    """Every life that left a trace, and the present one, `attempt`.

    reports: preflight's, by life. complete: there is a result.
    ends, ending: of the present life's ranks, and of its job.
    """
    recorded = reader.numbered(runfolder.LIVES, ".json")
    records = {number: reader.json(f"{runfolder.LIVES}/{number}.json", Life) for number in recorded}
    found = []
    hung = {hang.attempt for hang in found_hangs if hang.attempt is not None}
    for number in sorted({attempt, *recorded, *reports, *hung}):
        life, last = records.get(number), number == attempt
        cause = life.cause if life else None
        if last and cause is None:
            cause = _cause(ends, complete, ending)
        began = _checked(reports.get(number)) or _oldest(reader.run / runfolder.PREFLIGHT / str(number))
        if began is None and number == 0:
            began = _written(reader.run / runfolder.CONFIG)
        ended = _written(reader.run / runfolder.LIVES / f"{number}.json") if life and life.cause else None
        if last:
            of_job = _written(reader.run / runfolder.END) if ending else None
            ended = max((end.time for end in ends), default=ended or of_job)
        found.append(Span(number, life, began, ended, cause))
    return found


def newest_sign(beats: Sequence[Beat], found: Sequence[Hang]) -> float | None:
    """When the run was last heard of, where no end is known."""
    return max([*(beat.time for beat in beats), *(hang.alarm.time for hang in found if hang.alarm)], default=None)


def timed(lives: Sequence[Span], found: Sequence[Hang], sign: float | None) -> list[tuple[float, float]] | None:
    """Begin and end of each life; None where the times of files are not known or cannot be right."""
    begins = [one.began for one in lives]
    times: list[tuple[float, float]] = []
    for index, one in enumerate(lives):
        began = begins[index]
        after = begins[index + 1] if index + 1 < len(lives) else sign
        ended = one.ended if one.ended is not None else after
        if began is None:
            return None
        times.append((began, began if ended is None else ended))
    flat = [time for pair in times for time in pair]
    if any(later < earlier - CLOCKS_S for earlier, later in pairwise(flat)):
        return None
    by_life = {one.attempt: pair for one, pair in zip(lives, times, strict=True)}
    for hang in found:
        if hang.alarm is None or hang.alarm.attempt not in by_life:
            continue
        began, ended = by_life[hang.alarm.attempt]
        if not began - CLOCKS_S <= hang.alarm.time <= ended + CLOCKS_S:
            return None
    return [(began, max(began, ended)) for began, ended in times]


def _cause(ends: Sequence[End], complete: bool, ending: Ending | None) -> str | None:
    """How the present life ended, where `lives/` has no word of it."""
    bad = [end for end in ends if end.status not in ENDED_WELL]
    if bad:
        first = min(bad, key=lambda end: end.time)
        return f"rank {first.rank} ended with {first.signal or first.exception or f'status {first.status}'}"
    if ending is not None:
        return ending.cause
    if complete:
        return "complete"
    return "stopped" if any(end.status == runfolder.STOPPED for end in ends) else None


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _checked(report: Preflight | None) -> float | None:
    """When the first node was checked, by its own clock."""
    return min((node.wall for node in report.nodes if node.wall > 0), default=None) if report else None


def _oldest(folder: Path) -> float | None:
    """When the first report of a life's preflight was written, about when that life began."""
    try:
        return min((path.stat().st_mtime for path in folder.iterdir()), default=None)
    except OSError:
        return None
