"""What this node's GPUs do: readings of `nvidia-smi`, which may hang, and what is normal for these very devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from preflight import baseline
from preflight.device import SMI
from preflight.programs import ask
from slurm.evidence import Gpu

FIELDS = ("index", "uuid", "utilization.gpu", "utilization.memory", "power.draw", "clocks.sm")
DEADLINE_S = 6.0
EVERY_S = 600.0
"""A new reading of a healthy update is taken this often; each one costs the watcher some 50 ms."""


class NoReading(RuntimeError):
    """The GPUs could not be read: why."""


@dataclass(frozen=True)
class Reading:
    """One GPU by its uuid."""

    uuid: str
    gpu: Gpu


def read(deadline_s: float = DEADLINE_S) -> tuple[Reading, ...]:
    """All GPUs of this node, by index. Raises NoReading."""
    try:
        answer = ask([SMI, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"], deadline_s)
    except FileNotFoundError as error:
        raise NoReading(f"GPU readings: there is no {SMI}") from error
    if answer.status is None:
        raise NoReading(f"GPU readings: {SMI} did not answer in {deadline_s:g} s: driver stuck")
    if answer.status:
        raise NoReading(f"GPU readings: {SMI} ended with status {answer.status}: {answer.last_error_line}")
    return parse(answer.stdout)


def parse(text: str) -> tuple[Reading, ...]:
    """Lines of nvidia-smi, one per GPU (FIELDS) -> readings. Raises NoReading."""
    readings = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS) or not cells[0].isdecimal():
            raise NoReading(f"GPU readings: {SMI} printed {line!r}")
        readings.append(Reading(cells[1], Gpu(int(cells[0]), *(_number(cell) for cell in cells[2:]))))
    return tuple(readings)


def of_ranks(readings: Sequence[Reading], visible: str | None) -> tuple[Gpu, ...]:
    """One GPU per local rank: as CUDA_VISIBLE_DEVICES orders them, without it all of them."""
    if visible is None:
        return tuple(reading.gpu for reading in readings)
    found = []
    for name in filter(None, (part.strip() for part in visible.split(","))):
        of_name = (one.gpu for one in readings if name == str(one.gpu.index) or one.uuid.startswith(name))
        if (gpu := next(of_name, None)) is not None:
            found.append(gpu)
    return tuple(found)


def at_rest(run: Path, attempt: int, host: str) -> tuple[Reading, ...]:
    """What preflight has read of this node's GPUs before anything ran on them; empty where it did not.

    So too where its file is not an answer: a watcher does not end for want of a comparison.
    """
    try:
        found = baseline.at_rest(run, attempt, host)
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return tuple(
        Reading(one.uuid, Gpu(one.index, one.utilisation, one.memory_utilisation, one.power_w, one.sm_clock_mhz))
        for one in found
    )


class Computing:
    """The highest power of each GPU, with what was read beside it, in updates that went on as they should.

    Read in a thread of its own, because nvidia-smi may hang: then there is no reading, and nothing waits.
    """

    def __init__(self) -> None:
        self.readings: tuple[Reading, ...] = ()
        self._last = float("-inf")
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        """Take a reading, unless the last one is recent or still on its way."""
        now = time.monotonic()
        if now - self._last < EVERY_S or (self._thread is not None and self._thread.is_alive()):
            return
        self._last = now
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            new = read()
        except NoReading:
            return
        best = {one.uuid: one for one in self.readings}
        self.readings = tuple(_higher(one, best.get(one.uuid)) for one in new)


def _higher(new: Reading, old: Reading | None) -> Reading:
    if old is None or (new.gpu.power_w or 0.0) >= (old.gpu.power_w or 0.0):
        return new
    return replace(old, gpu=replace(old.gpu, index=new.gpu.index))


def _number(text: str) -> float | None:
    """None for what the device does not tell (`[N/A]`)."""
    try:
        return float(text)
    except ValueError:
        return None
