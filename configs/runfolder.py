"""Names of the files in a run folder, and the only ways to write them.

Every file is written aside and renamed, so that nobody ever reads half a file. A process of an earlier life of the
job (a node whose slurmd died can keep its ranks running) may not rename anything into the folder: `write_text`
compares the process's attempt with the folder's before it renames.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from configs.errors import UserError

CONFIG = "config.yaml"
CODE = "code"
SUBMIT_SCRIPT = "submit.sh"
ATTEMPT = "attempt"
PREFLIGHT = "preflight"
LOGS = "logs"
HEARTBEAT = "heartbeat"
HANGS = "hangs"
LIVES = "lives"
END = "end.json"
JOB = "job"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
ADAPTER = "adapter"
WEIGHTS = "weights"
MERGED = "merged"
RESULT = "result.json"
METRIC_FILES = "metrics"
TRACKERS = "trackers.json"
EVALUATIONS = "evaluations"
PLAN = "plan.json"
REPORT = "report.html"

STOPPED = 3
"""Exit status of a rank that was asked to stop, saved a checkpoint and did: the run can go on."""


class Damaged(UserError, ValueError):
    """A file of a run folder does not hold what belongs there: which file, and what is wrong with it."""


class StaleAttempt(RuntimeError):
    """This process belongs to an earlier life of the job and may not write into its run folder."""


def current_attempt(run: Path) -> int:
    """Number of the run's present life, 0 for the first; kept in the file `attempt`. Raises Damaged."""
    try:
        return int((run / ATTEMPT).read_text())
    except FileNotFoundError:
        return 0
    except ValueError as error:
        raise Damaged(f"{run / ATTEMPT} is damaged: the number of a life is expected") from error


def process_attempt() -> int:
    """The life that this process was started in: `PREFIX_TRAIN_ATTEMPT`, 0 where it is not set."""
    return int(os.environ.get("PREFIX_TRAIN_ATTEMPT", "0"))


def of_life(run: Path) -> Path | None:
    """`run` in a process of one of its lives; none in a person's shell, which belongs to no life."""
    return run if "PREFIX_TRAIN_ATTEMPT" in os.environ else None


def check_attempt(run: Path) -> None:
    """Raise StaleAttempt if `run` has gone on to a later life than this process's."""
    mine, now = process_attempt(), current_attempt(run)
    if mine < now:
        raise StaleAttempt(f"attempt {mine} may not write into {run}: the job is in attempt {now}")


def write_aside(path: Path, fill: Callable[[BinaryIO], object], *, run: Path | None = None) -> None:
    """Let `fill` write a temporary file beside `path`, sync it, then rename it over `path`.

    With `run` given, a process of an earlier attempt raises StaleAttempt and leaves `path` as it was; where the run
    folder has been removed, FileNotFoundError is raised and it does not come back.
    """
    if run is not None and not run.is_dir():
        raise FileNotFoundError(f"the run folder {run} is gone")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        with aside.open("wb") as stream:
            fill(stream)
            stream.flush()
            os.fsync(stream.fileno())
        if run is not None:
            check_attempt(run)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, run: Path | None = None) -> None:
    """Write `text` as UTF-8, whole or not at all."""
    write_aside(path, lambda stream: stream.write(text.encode()), run=run)


def write_json(path: Path, value: Any, *, run: Path | None = None) -> None:
    """Write `value` as indented JSON, whole or not at all; NaN and infinities are errors."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n", run=run)


def read_json(path: Path) -> Any:
    """Read a JSON file of a run folder. Raises Damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: {error}") from error


@contextmanager
def reading() -> Iterator[None]:
    """What the disk refuses to the block is a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from error
