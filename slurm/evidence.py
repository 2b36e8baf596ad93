"""What was seen of a run that stopped advancing: one file per node under hangs/<n>/evidence/, read by `slurm.verdict`.

Everything is seen from outside the ranks, in two rounds some seconds apart. What could not be had is written down with
its reason, never left out: a verdict says what it did not know. No torch here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec

from configs import runfolder
from prefix_train.heartbeat import Beat, End
from slurm import stacks
from slurm.stacks import Stack

FOLDER, ALARM = "evidence", "alarm.json"


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding says of a file that is damaged, or was written by nobody of ours."""


class BadEvidence(runfolder.Damaged):
    """A file under evidence/ that is not a node's evidence: which file, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of one rank, from its ring or from NCCL's flight recorder."""

    number: int
    """Place among the collectives of its group on this rank, from 0: what must match over the ranks."""
    group: str
    kind: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `barrier`, ..."""
    sizes: tuple[tuple[int, ...], ...]
    """Shapes of this rank's input tensors."""
    dtype: str
    where: str
    """`file:line` of the nearest caller outside torch."""
    state: str
    """`called`: it has not returned. `done`. `raised`."""
    phase: str
    update: int
    pack: int
    started: float
    """CLOCK_MONOTONIC of its node, seconds."""
    ended: float | None


@dataclass(frozen=True, slots=True)
class Process:
    """A process in one round. state: letter of /proc/PID/stat, empty where there is none."""

    pid: int
    name: str
    state: str
    wchan: str
    cpu_s: float
    """User and system time so far."""
    read_bytes: int
    """By system calls, and from disk, which includes mapped files."""
    written_bytes: int
    rss_bytes: int
    blocked_files: tuple[str, ...]
    """Open regular files, with the kind of their file system in brackets, of a process that waits in the kernel."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A rank in one round. None: could not be had, and `Rank.missing` says why."""

    beat: Beat | None
    stack: Stack | None
    process: Process | None
    children: tuple[Process, ...]


@dataclass(frozen=True, slots=True)
class Rank:
    """All that is known of one rank of this node."""

    rank: int
    rounds: tuple[Seen, Seen]
    collectives: tuple[Collective, ...]
    """The last ones, oldest first; of several groups mixed."""
    end: End | None
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One reading of one GPU. None: the device does not tell."""

    index: int
    utilisation: float | None
    """Percent."""
    memory_utilisation: float | None
    """Percent."""
    power_w: float | None
    sm_clock_mhz: float | None


@dataclass(frozen=True, slots=True)
class Node:
    """What one node's watcher saw.

    gpus: one tuple of readings per round. idle, computing: the same devices' own readings at rest (from preflight) and
    in a finished update (from the watcher), empty where there were none. scheduler: what Slurm says of job and node.
    """

    host: str
    index: int
    attempt: int
    time: float
    """Wall clock at the first round."""
    clock: float
    """CLOCK_MONOTONIC at the first round."""
    gap_s: float
    ranks: tuple[Rank, ...]
    gpus: tuple[tuple[Gpu, ...], tuple[Gpu, ...]]
    idle: tuple[Gpu, ...]
    computing: tuple[Gpu, ...]
    kernel_log: tuple[str, ...]
    """Lines about GPUs (XID), killed processes and file systems since the life began."""
    scheduler: str
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Alarm:
    """Why evidence is taken: the first watcher to notice writes it, and all watchers answer."""

    attempt: int
    host: str
    rank: int
    age: float
    """Seconds in the same place, and what was allowed."""
    limit: float
    sentence: str
    time: float
    node: int = -1
    """Index of the node whose watcher noticed; -1: a person asked."""
    must_end: bool = False
    """The ranks are ended whatever the evidence says."""

    @property
    def only_look(self) -> bool:
        """Whether somebody only wants to see: nothing is ended."""
        return self.node < 0 and not self.must_end


def of_end(run: Path, attempt: int) -> Path:
    """logs/end-<attempt>: what was seen of a life in which a rank ended badly, taken before the others are ended."""
    return run / runfolder.LOGS / f"end-{attempt}"


def write(folder: Path, node: Node, run: Path) -> None:
    """Write a node's evidence into hangs/<n>."""
    text = msgspec.json.format(msgspec.json.encode(node), indent=1).decode()
    runfolder.write_text(folder / FOLDER / f"{node.index}-{quote(node.host, safe='')}.json", text + "\n", run=run)
    for rank in node.ranks:
        runfolder.write_text(folder / f"rank{rank.rank}.txt", render(node, rank), run=run)


def render(node: Node, rank: Rank) -> str:
    """One rank's two rounds as text for people."""
    lines = []
    whens = (time.strftime("%F %T", time.localtime(node.time)), f"{node.gap_s:.1f} s later")
    for name, when, seen in zip(("first", "second"), whens, rank.rounds, strict=True):
        beat = seen.beat
        standing = (
            f"phase {beat.phase} ({beat.part}), update {beat.update}, pack {beat.pack}" if beat else "no heartbeat"
        )
        lines.append(f"== {name} sample, {when}: rank {rank.rank}, {standing}, host {node.host}")
        lines.append(stacks.render(seen.stack) if seen.stack else "no frames\n")
    lines += [f"not to be had: {reason}" for reason in rank.missing]
    return "\n".join(lines).rstrip("\n") + "\n"


def write_alarm(folder: Path, alarm: Alarm, run: Path | None) -> None:
    """Write hangs/<n>/alarm.json; without `run` from outside the job, whatever life it is in."""
    text = msgspec.json.format(msgspec.json.encode(alarm), indent=1).decode()
    runfolder.write_text(folder / ALARM, text + "\n", run=run)


def read_alarm(folder: Path) -> Alarm | None:
    """The alarm of hangs/<n>; None where there is none yet. Raises BadEvidence."""
    try:
        return msgspec.json.decode((folder / ALARM).read_bytes(), type=Alarm)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise BadEvidence(f"{folder / ALARM}: {error}") from error


def read(folder: Path) -> tuple[Node, ...]:
    """Every node's evidence in hangs/<n>, by node index. Raises BadEvidence."""
    found = [_load(path) for path in sorted((folder / FOLDER).glob("*.json"))]
    return tuple(sorted(found, key=lambda node: node.index))


def answered(folder: Path) -> set[int]:
    """Indices of the nodes that have given evidence."""
    return {int(path.name.partition("-")[0]) for path in (folder / FOLDER).glob("*-*.json")}


def _load(path: Path) -> Node:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Node)
    except UNREADABLE as error:
        raise BadEvidence(f"{path}: {error}") from error
