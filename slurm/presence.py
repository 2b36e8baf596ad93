"""A node's watcher says that it is there, in heartbeat/watch<node>.json, and its ranks start only then.

A rank that nobody watches hangs until its time is up. So a watcher that never starts ends the job before it has cost
anything. One that dies later does not: what is trained is the same without it, a hang over several nodes is seen by
the watchers of the others, and the time limit is left. It is said in the rank's log and in the job's last line.

The ranks' step begins when all watchers have spoken: a node that launches two steps at a time has failed at one.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import psutil
import typer

from configs import runfolder
from configs.compose import from_run
from configs.console import make_app
from configs.console import run as run_app
from slurm import records

BEAT_S = 10.0
"""A watcher says this often that it is still there."""
LOOK_S = 0.1


@dataclass(frozen=True)
class Presence:
    """One node's watcher. node: index in the job. Times are wall clock, seconds since 1970."""

    node: int
    attempt: int
    host: str
    pid: int
    time: float
    gone: float | None = None
    """When a rank's parent found that it runs no more."""
    left: bool = False
    """It has nothing left to watch. A rank that has said how it ended may take a while yet to be gone."""


def say(run: Path, node: int) -> None:
    """This process is the watcher of `node`. Raises StaleAttempt in one of an earlier life."""
    _write(run, Presence(node, runfolder.process_attempt(), socket.gethostname(), os.getpid(), time.time()))


def leave(run: Path, node: int) -> None:
    """This process, the watcher of `node`, ends because its ranks have."""
    if (found := read(run, node)) is not None:
        _write(run, replace(found, left=True))


def read(run: Path, node: int) -> Presence | None:
    """The watcher of `node` in this process's life; none: it has not said anything. Raises Damaged."""
    try:
        found = records.read(_path(run, node), Presence)
    except FileNotFoundError:
        return None
    return found if found.attempt == runfolder.process_attempt() else None


def wait(run: Path, node: int, seconds: float) -> bool:
    """Wait for the watcher of `node`; whether it came."""
    until = time.monotonic() + seconds
    while read(run, node) is None:
        if time.monotonic() > until:
            return False
        time.sleep(LOOK_S)
    return True


def wait_for_all(run: Path, nodes: int, seconds: float) -> list[int]:
    """Wait for the watchers of all `nodes`; those that did not come."""
    until = time.monotonic() + seconds
    return [node for node in range(nodes) if not wait(run, node, max(until - time.monotonic(), 0.0))]


def check(run: Path, node: int) -> bool:
    """Whether the watcher of this very node, `node`, has died; the first time it is written down."""
    found = read(run, node)
    if found is None or found.gone is not None or found.host != socket.gethostname() or runs(found.pid, found.time):
        return False
    found = read(run, node)  # what it wrote last: it may have ended since the first reading
    if found is None or found.left:
        return False
    _write(run, replace(found, gone=time.time()))
    return True


def lost(run: Path, attempt: int) -> list[Presence]:
    """Watchers of life `attempt` that were found to run no more while ranks of their nodes did, by node."""
    found = (records.read(path, Presence) for path in (run / runfolder.HEARTBEAT).glob("watch*.json"))
    return sorted((one for one in found if one.attempt == attempt and one.gone), key=lambda one: one.node)


def runs(pid: int, then: float) -> bool:
    """Whether process `pid`, which ran at wall clock `then`, still does: a later one with its number does not count."""
    try:
        process = psutil.Process(pid)
        return bool(process.create_time() <= then + 1 and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _write(run: Path, presence: Presence) -> None:
    runfolder.write_json(_path(run, presence.node), asdict(presence), run=run)


def _path(run: Path, node: int) -> Path:
    return run / runfolder.HEARTBEAT / f"watch{node}.json"


app = make_app(
    "Wait for a job's watchers. Called by the job, not by people. Example: python -m slurm.presence runs/demo-1"
)


@app.command()
def main(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> int:
    """Wait for every node's watcher, `watch.start_s` at most: what follows when one does not come is for its ranks."""
    config = from_run(run)
    wait_for_all(run, config.slurm.nodes, config.watch.start_s)
    return 0


if __name__ == "__main__":
    run_app(app)
