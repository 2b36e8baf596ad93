"""One small file per rank: what it does, since when, and how it ended.

A rank calls `Heartbeat.phase` at each change of phase and `beat` where a phase is long. A watcher outside the ranks
reads the files and nothing else. No torch here: watchers and commands on a login node start in milliseconds.
"""

from __future__ import annotations

import json
import os
import signal as signals
import socket
import time
import traceback
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from configs import runfolder
from configs.errors import UserError

PHASES = (
    *("load", "compile", "first_update", "data", "forward", "backward", "reduce", "optimizer"),
    *("save", "evaluate", "done"),
)
"""`compile`: kernels are compiled, ahead of the first update. `data`: waiting for the update's batches, which are made
in the background."""
UPDATE_PHASES = frozenset({"first_update", "data", "forward", "backward", "reduce", "optimizer"})
KEPT_DURATIONS = 128


class BadRecord(runfolder.Damaged):
    """A heartbeat or end record that is not what this module writes: which file, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Beat:
    """Where a rank stands.

    `clock`, `since_clock` and `update_clock` are seconds of CLOCK_MONOTONIC, which every process of one node shares
    until its next boot: a watcher there takes ages from them. Other nodes compare `time` and `since`.
    """

    rank: int
    world: int
    attempt: int
    host: str
    pid: int
    phase: str
    """One of PHASES. The update that a process does first is `first_update` throughout, for it may compile."""
    part: str
    """The phase as the trainer named it: `forward`, `backward`, ... also within the first update."""
    update: int
    """The update that is being done, from 1; 0 before the first."""
    pack: int
    """The pack of the update that is being done, from 0; -1 outside packs."""
    time: float
    """Wall clock of this beat, seconds since 1970."""
    since: float
    """Wall clock of the beginning of `phase`."""
    clock: float
    since_clock: float
    update_clock: float | None
    """Beginning of the update that is being done; none between updates."""
    completed: int
    """Updates that this process has finished."""
    durations: tuple[float, ...]
    """Seconds of the last updates but the process's first, oldest first, at most KEPT_DURATIONS."""


class Heartbeat:
    """Writes `heartbeat/rank<k>.json`, whole each time, in well under a millisecond on a local disk.

    Raises StaleAttempt where the run has gone on to a later life, OSError where the file cannot be written.
    """

    def __init__(self, run: Path, rank: int, world: int) -> None:
        self.run, self.rank, self.world = run, rank, world
        self._path = run / runfolder.HEARTBEAT / f"rank{rank}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._aside = self._path.with_name(f".{self._path.name}.{self._host}.{self._pid}.tmp")
        self._phase, self._part, self._update, self._pack = "load", "load", 0, -1
        self._since, self._since_clock = time.time(), time.monotonic()
        self._update_clock: float | None = None
        self._completed = 0
        self._durations: deque[float] = deque(maxlen=KEPT_DURATIONS)
        self.beat()

    def phase(self, name: str, update: int | None = None, pack: int = -1) -> None:
        """Enter phase `name` of update `update` (none: the same as before), at pack `pack` of it."""
        if name not in PHASES:
            raise ValueError(f"no phase {name!r}; phases are {', '.join(PHASES)}")
        now = time.monotonic()
        number = self._update if update is None else update
        within = name in UPDATE_PHASES
        if self._update_clock is not None and (number != self._update or not within):
            self._finish_update(now)
        if within and self._update_clock is None:
            self._update_clock = now
        shown = "first_update" if within and self._completed == 0 else name
        if shown != self._phase or number != self._update:
            self._since, self._since_clock = time.time(), now
        self._phase, self._part, self._update, self._pack = shown, name, number, pack
        self.beat()

    @property
    def standing(self) -> tuple[str, int, int]:
        """Phase as it was named, update, pack."""
        return self._part, self._update, self._pack

    def beat(self) -> None:
        """Say again where the rank stands, so that a long phase is seen to be alive."""
        beat = Beat(
            rank=self.rank,
            world=self.world,
            attempt=runfolder.process_attempt(),
            host=self._host,
            pid=self._pid,
            phase=self._phase,
            part=self._part,
            update=self._update,
            pack=self._pack,
            time=time.time(),
            since=self._since,
            clock=time.monotonic(),
            since_clock=self._since_clock,
            update_clock=self._update_clock,
            completed=self._completed,
            durations=tuple(self._durations),
        )
        self._aside.write_text(json.dumps(asdict(beat), allow_nan=False), encoding="utf-8")
        runfolder.check_attempt(self.run)
        self._aside.replace(self._path)

    def _finish_update(self, now: float) -> None:
        if self._completed and self._update_clock is not None:
            self._durations.append(now - self._update_clock)
        self._completed += 1
        self._update_clock = None


def read(run: Path, ranks: Iterable[int] | None = None) -> list[Beat]:
    """The last beat of every rank that ever wrote one, by rank; ranks of earlier lives carry their own `attempt`.

    ranks: only these. Raises BadRecord naming the file where one is not a beat.
    """
    return [_load(path, Beat) for path in _ranked(run / runfolder.HEARTBEAT, ranks)]


@dataclass(frozen=True, slots=True)
class End:
    """How a rank ended."""

    rank: int
    world: int
    attempt: int
    host: str
    pid: int
    time: float
    """Wall clock, seconds since 1970."""
    phase: str | None
    """Phase of the rank's last beat in this life; none: it never gave one."""
    update: int | None
    status: int | None
    """Exit status; none where a signal ended the process."""
    signal: str | None
    """Name of the signal (`SIGKILL`)."""
    exception: str | None
    """Type of the exception, with its module unless it is a builtin."""
    message: str | None
    """The exception's, or what another process knows of the reason why a signal ended this one."""
    where: str | None
    """`file:line` that raised."""
    frames: tuple[str, ...]
    """`file:line function` of the whole traceback, the raising frame last."""


def exit_status(error: BaseException | None) -> int:
    """What a process that ended with `error` exits with: 0 none, 2 a user's mistake, 1 anything else."""
    if error is None:
        return 0
    if isinstance(error, UserError):
        return 2
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


def ended(
    run: Path,
    rank: int,
    world: int,
    *,
    error: BaseException | None = None,
    signal: int | None = None,
    status: int | None = None,
    host: str | None = None,
    pid: int | None = None,
    message: str | None = None,
) -> End:
    """Write `logs/rank<k>.json`: how `rank` ended. A rank calls it last; a watcher does for one that could not.

    `error` alone gives its own exit status. `host` and `pid`: of the rank, where the caller is another process.
    `message`: what that one knows of the reason. Raises StaleAttempt where the run has gone on to a later life.
    """
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    places = tuple(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
    last = _last_beat(run, rank)
    end = End(
        rank=rank,
        world=world,
        attempt=runfolder.process_attempt(),
        host=host or socket.gethostname(),
        pid=pid or os.getpid(),
        time=time.time(),
        phase=last.phase if last else None,
        update=last.update if last else None,
        status=exit_status(error) if status is None and signal is None else status,
        signal=signals.Signals(signal).name if signal is not None else None,
        exception=_type_name(error) if error is not None else None,
        message=str(error) if error is not None else message,
        where=places[-1].rpartition(" ")[0] if places else None,
        frames=places,
    )
    runfolder.write_json(run / runfolder.LOGS / f"rank{rank}.json", asdict(end), run=run)
    return end


def read_ends(run: Path, ranks: Iterable[int] | None = None) -> list[End]:
    """How every rank ended that has ended, by rank; `ranks`: only these.

    Raises BadRecord naming the file where one is not such a record.
    """
    return [_load(path, End) for path in _ranked(run / runfolder.LOGS, ranks)]


def _last_beat(run: Path, rank: int) -> Beat | None:
    path = run / runfolder.HEARTBEAT / f"rank{rank}.json"
    beat = _load(path, Beat) if path.exists() else None
    return beat if beat and beat.attempt == runfolder.process_attempt() else None


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _ranked(folder: Path, ranks: Iterable[int] | None) -> list[Path]:
    if ranks is not None:  # a job of many nodes has too many files for each watcher to list them all the time
        return [path for rank in sorted(ranks) if (path := folder / f"rank{rank}.json").exists()]
    files = {path.stem.removeprefix("rank"): path for path in folder.glob("rank*.json")}
    return [files[rank] for rank in sorted((rank for rank in files if rank.isdecimal()), key=int)]


Record = TypeVar("Record", Beat, End)
_HINTS: dict[type, dict[str, Any]] = {kind: get_type_hints(kind) for kind in (Beat, End)}


def _load(path: Path, kind: type[Record]) -> Record:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRecord(f"{path}: an object is expected, not {type(value).__name__}")
    names = {field.name for field in fields(kind)}
    if missing := sorted(names - value.keys()):
        raise BadRecord(f"{path}: without {', '.join(missing)}")
    if unknown := sorted(value.keys() - names):
        raise BadRecord(f"{path}: unknown {', '.join(unknown)}")
    hints = _HINTS[kind]
    for name in sorted(names):
        if not _fits(value[name], hints[name]):
            raise BadRecord(f"{path}: {name} is {value[name]!r}")
    found: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in value.items()}
    return kind(**found)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value is what a field of type `hint` is written as."""
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return isinstance(value, list) and {type(one) for one in value} <= ({int, float} if item is float else {item})
    if get_origin(hint) is UnionType:
        return any(_fits(value, choice) for choice in get_args(hint))
    return type(value) is hint or (hint is float and type(value) is int)
