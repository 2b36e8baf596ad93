"""Experiment trackers of a run, through Accelerate's classes, each told by a thread of its own.

metrics.jsonl is the record, a dashboard is a copy of it. So one that cannot be started ends a run only before its first
update. Later, whatever it does, training neither waits for it nor ends: a line that it did not take is counted, the
first reason is said, and both stand in `trackers.json`, in the result and on the run's page.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from configs import runfolder, tracker_names
from configs.errors import UserError
from configs.redact import redact, redact_value
from configs.schema import Config

MOST_WAITING = 10_000
"""Lines that wait for a tracker; further ones are counted as not taken."""
START_S = 180.0
"""Longest start of a tracker."""
CLOSE_S = 60.0
"""How long a tracker may take at the end for what it has not taken yet."""
HASTE_S = 5.0
"""The same where the run ends with an error."""
MOST_LETTERS = 300


@dataclass
class Standing:
    """What has become of one tracker, over all lives of the run. id: of its run, by which later lives find it."""

    id: str
    taken: int = 0
    failed: int = 0
    error: str = ""
    """Why the first line that was not taken was not."""


class Feed:
    """One tracker and the thread that tells it. make: makes and starts it in that thread; gives it and its run's id."""

    def __init__(self, name: str, standing: Standing, make: Callable[[], tuple[Any, str]]) -> None:
        self.name, self.standing, self._make = name, standing, make
        self.mistake: str | None = None
        """Why it has not started."""
        self._lines: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(MOST_WAITING)
        self._given = self._seen = 0
        """Lines that were handed over, and that the thread is done with."""
        self._started = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()
        if not self._started.wait(START_S):
            self.mistake = f"not ready after {START_S:.0f} s"

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Hand over one line; never waits."""
        if self.mistake is not None:
            self._fail(self.mistake)
            return
        try:
            self._lines.put_nowait((dict(values), step))
            self._given += 1
        except queue.Full:
            self._fail(f"{MOST_WAITING:,} lines wait for it")

    def close(self, patience_s: float) -> None:
        """Let it take what waits, and finish; what it has not taken by then is counted."""
        if self.mistake is not None or not self._thread.is_alive():
            return
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            patience_s = 0.0
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self.mistake = f"not done {patience_s:.0f} s after the run's end"
            for _ in range(max(1, self._given - self._seen)):  # at least its own end
                self._fail(self.mistake)

    def _work(self) -> None:
        try:
            tracker, self.standing.id = self._make()
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever its package raises
            self.mistake = _said(error)
        finally:
            self._started.set()
        if self.mistake is not None:
            return
        while (line := self._lines.get()) is not None:
            self._try(lambda line=line: tracker.log(line[0], step=line[1]))  # type: ignore[misc]
            self._seen += 1
        self._try(tracker.finish, line=False)

    def _try(self, tell: Callable[[], object], line: bool = True) -> None:
        try:
            tell()
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever its package raises: the run goes on
            self._fail(_said(error))
            return
        with self._lock:
            self.standing.taken += line

    def _fail(self, why: str) -> None:
        with self._lock:
            self.standing.failed += 1
            self.standing.error = self.standing.error or why


class Trackers:
    """The trackers of `config` for one life of `run`, on rank 0. say: how a person is told that one has failed."""

    def __init__(self, run: Path, config: Config, goes_on: bool, say: Callable[[str], None]) -> None:
        """goes_on: whether the run has begun before. Raises UserError where a tracker cannot be started before it has.

        TensorBoard is none of them: its files are written anyway.
        """
        self._run, self._say = run, say
        self._told: set[str] = set()
        names = [name for name in dict.fromkeys(config.report.trackers) if name != "tensorboard"]
        tracker_names.require(names)
        known = _read(run)
        if names:
            _ready_accelerate()
        self.feeds = [Feed(name, known.get(name, Standing("")), _maker(name, run, config, known)) for name in names]
        with ExitStack() as started:
            started.callback(self._finish, HASTE_S)
            for feed in self.feeds:
                self._check_started(feed, goes_on)
            self._write()
            started.pop_all()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Tell all of them; what one does with it is counted."""
        for feed in self.feeds:
            feed.log(values, step)
        self._tell()

    def close(self, patience_s: float = CLOSE_S) -> dict[str, Any]:
        """Finish all of them; what became of each, by name."""
        self._finish(patience_s)
        self._tell()
        self._write()
        return self.standings()

    def standings(self) -> dict[str, Any]:
        """What has become of each, by name."""
        return {feed.name: vars(feed.standing).copy() for feed in self.feeds}

    def _check_started(self, feed: Feed, goes_on: bool) -> None:
        if feed.mistake is None:
            return
        if not goes_on:
            raise UserError(
                f"report.trackers: {feed.name} cannot be started: {feed.mistake}; mend that, set "
                f"report.offline=true, or leave {feed.name} out"
            )
        self._say(f"{feed.name} cannot be started: {feed.mistake}; the run goes on without it")
        self._told.add(feed.name)

    def _finish(self, patience_s: float) -> None:
        for feed in self.feeds:
            feed.close(patience_s)

    def _tell(self) -> None:
        for feed in self.feeds:
            if feed.standing.failed and feed.name not in self._told:
                self._told.add(feed.name)
                self._say(
                    f"{feed.name} did not take a line: {feed.standing.error}; the run goes on, metrics.jsonl has it"
                )
                self._write()

    def _write(self) -> None:
        if self.feeds:
            runfolder.write_json(self._run / runfolder.TRACKERS, self.standings(), run=self._run)


def flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options by dotted name, as scalars or text: what every tracker takes."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{name}."))
        else:
            found[prefix + name] = value if isinstance(value, bool | int | float | str) else str(value)
    return found


def _maker(name: str, run: Path, config: Config, known: Mapping[str, Standing]) -> Callable[[], tuple[Any, str]]:
    """Makes and starts a tracker, and tells it the run's options, without secrets, if this is its first life."""
    before = known[name].id if name in known else ""

    def make() -> tuple[Any, str]:
        from dataclasses import asdict

        from accelerate import tracking

        kind = tracking.LOGGER_TYPE_TO_CLASS[name]
        folder = (str(run / runfolder.LOGS / name),) if kind.requires_logging_directory else ()
        report = config.report
        title = report.run_name or run.name
        arguments = KEYWORDS[name](run, title, before, report.offline) if name in KEYWORDS else {}
        tracker = kind(report.project or config.name, *folder, **arguments)
        tracker.start()
        if not before:
            tracker.store_init_configuration(flat(redact_value(asdict(config))))
        return tracker, tracker.tracker.info.run_id if name == "mlflow" else run.name

    return make


def _wandb(run: Path, title: str, before: str, offline: bool) -> dict[str, Any]:
    """The folder's name is its id: later lives append. Its console capture would wrap the progress display."""
    mode = {"mode": "offline"} if offline else {}
    folder, settings = str(run / runfolder.LOGS), {"console": "off"}
    return {"id": run.name, "name": title, "resume": "allow", "dir": folder, "settings": settings, **mode}


def _mlflow(run: Path, title: str, before: str, offline: bool) -> dict[str, Any]:
    """The server gives the id, which later lives name."""
    if offline:
        import mlflow

        # What its small package can write without a database; without this it refuses, since it ends support for it.
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        mlflow.set_tracking_uri((run / runfolder.LOGS / "mlflow").absolute().as_uri())
    return {"run_id": before or None, "run_name": title}


def _trackio(run: Path, title: str, before: str, offline: bool) -> dict[str, Any]:
    """Runs are found by name. Offline: whatever the environment names is not reached."""
    if offline:
        for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            os.environ.pop(variable, None)
    return {"name": run.name, "resume": "allow", "embed": False}


KEYWORDS: dict[str, Callable[[Path, str, str, bool], dict[str, Any]]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
"""Of (run folder, title, id in an earlier life or nothing, offline). Others are started as Accelerate does."""


def _ready_accelerate() -> None:
    """The trackers' log lines need Accelerate's state, whose construction may change the number of threads."""
    from accelerate import PartialState

    threads = torch.get_num_threads()
    PartialState(cpu=True)
    torch.set_num_threads(threads)


def _read(run: Path) -> dict[str, Standing]:
    path = run / runfolder.TRACKERS
    return {name: Standing(**one) for name, one in runfolder.read_json(path).items()} if path.exists() else {}


def _said(error: BaseException) -> str:
    """What a package raised, as one line without secrets."""
    return redact(" ".join(f"{type(error).__name__}: {error}".split()))[:MOST_LETTERS]
