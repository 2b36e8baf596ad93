"""Builds of a store that are killed, or run out of room: a program, since a test must outlive them.

    stream_faults.py kill MODEL FOLDER EVENT ...     builds FOLDER/<event>, killed before that event, and again unharmed
    stream_faults.py full MODEL FOLDER ROOM          builds FOLDER/store with so many bytes free, then makes room

An event is a write to a file of the store, half of which still happens, or a file's getting or losing its name. Prints
one JSON line for each build. Every build is a process of its own, forked from this one, which has imported everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from configs import runfolder
from configs.console import run
from prefix_train.stream import build as _imported  # noqa: F401
from prefix_train.stream.cli import app

NEVER = 1 << 30


class Events:
    """Counts, and kills this process before event `last`."""

    def __init__(self, last: int) -> None:
        self.last, self.seen = last, 0

    def next(self, half: Callable[[], object] = lambda: None) -> None:
        if self.seen == self.last:
            half()
            os.kill(os.getpid(), signal.SIGKILL)
        self.seen += 1


class Writing:
    """A file whose writes are events."""

    def __init__(self, file: BinaryIO, events: Events) -> None:
        self.file, self.events = file, events

    def write(self, data: Any) -> int:
        def half() -> None:
            self.file.write(data[: len(data) // 2])
            self.file.flush()

        self.events.next(half)
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def watch(last: int) -> Events:
    """Make this process's building a series of events, the last of which kills it."""
    events = Events(last)
    write_aside, replace, unlink = runfolder.write_aside, Path.replace, Path.unlink

    def watched_write(path: Path, fill: Callable[[Any], object], *, run: Path | None = None) -> None:
        write_aside(path, lambda file: fill(Writing(file, events)), run=run)

    def watched_replace(self: Path, target: Path) -> Path:
        events.next()
        found = replace(self, target)
        events.next()
        return found

    def watched_unlink(self: Path, missing_ok: bool = False) -> None:
        events.next()
        unlink(self, missing_ok)

    runfolder.write_aside = watched_write
    Path.replace, Path.unlink = watched_replace, watched_unlink  # type: ignore[method-assign]
    return events


def forked(work: Callable[[], object]) -> tuple[int, str]:
    """(Exit status or minus the signal, what it printed to both streams) of `work` in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        status = 1
        try:
            work()
        except SystemExit as ended:
            status = int(ended.code or 0)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        printed = pipe.read().decode()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), printed


def build(model: str, folder: Path) -> None:
    run(app, ["build", "--model", model, "--out", str(folder), "--weights", "nf4", "--double-quant", "--json"])


def killed(model: str, folder: Path, last: int) -> dict[str, Any]:
    """A build that is killed before event `last`, and the one that follows it."""
    counted = folder.parent / f"{folder.name}.events"

    def first() -> None:
        events = watch(last)
        try:
            build(model, folder)
        finally:
            counted.write_text(str(events.seen))

    status, _ = forked(first)
    there = {path.name: path.stat().st_ino for path in folder.glob("*.bin")} if folder.exists() else {}
    again, printed = forked(lambda: build(model, folder))
    kept = {path.name for path in folder.glob("*.bin") if there.get(path.name) == path.stat().st_ino}
    return {
        "event": last,
        "killed": status,
        "again": again,
        "events": int(counted.read_text()) if counted.exists() else None,
        "there": sorted(there),
        "kept": sorted(kept),
        "printed": printed,
    }


def full(model: str, folder: Path, room: int) -> list[dict[str, Any]]:
    """A build on a disk that another fills meanwhile, and the one after room was made."""
    store, other = folder / "store", folder / "other"

    def crowded() -> None:
        usage = shutil.disk_usage
        other.write_bytes(bytes(usage(folder).free - room))
        answers = iter([usage("/")])  # what was free before the other came
        shutil.disk_usage = lambda path: next(answers, None) or usage(path)
        build(model, store)

    status, printed = forked(crowded)
    left = sorted(path.name for path in store.iterdir())
    other.unlink()
    again, _ = forked(lambda: build(model, store))
    return [
        {"status": status, "printed": printed, "left": left, "again": again},
        {"files": {path.name: path.read_bytes().hex() for path in sorted(store.iterdir())}},
    ]


if __name__ == "__main__":
    if sys.argv[1] == "kill":
        for event in sys.argv[4:]:
            print(json.dumps(killed(sys.argv[2], Path(sys.argv[3]) / event, int(event))), flush=True)
    else:
        for line in full(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])):
            print(json.dumps(line), flush=True)
