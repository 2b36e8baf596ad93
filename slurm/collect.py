"""One node's evidence of a run that does not advance: two rounds of looking at its ranks, and what else can be had.

Every piece has its deadline and runs in a thread of its own; what fails or comes late is noted in the evidence and
waited for no longer: the whole takes two rounds and the time between them at most. Nothing here changes or ends a rank.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from prefix_train import heartbeat, ring
from prefix_train.heartbeat import Beat, End
from prefix_train.ring import Record
from slurm import flight, gpus, kernel_log, presence, processes, scheduler, stacks
from slurm.evidence import Collective, Gpu, Node, Process, Rank, Seen
from slurm.gpus import Reading
from slurm.rank import stack_file
from slurm.stacks import Stack

ROUND_S = 10.0
"""Longest round: what has not come by then is missing from it."""
PROCESS_S = 2.0
SLURM_S = 5.0
LAG_S = 3.0
"""A pause that is longer by this is one in which the machine did not run this process."""

T = TypeVar("T")


@dataclass(frozen=True)
class Scene:
    """What a watcher knows of its node. ranks: those of the node. gpus: whether they compute on GPUs.

    since: CLOCK_MONOTONIC when the life began, seconds. computing: readings of healthy updates. gap_s: time between
    the rounds.
    """

    run: Path
    attempt: int
    host: str
    index: int
    ranks: tuple[int, ...]
    gap_s: float
    since: float
    gpus: bool = False
    computing: tuple[Reading, ...] = ()


class Missing(RuntimeError):
    """A piece of evidence that could not be had: which, and why."""


class Piece(Generic[T]):
    """Something that is being found out, in a thread that may hang for ever without keeping this process."""

    def __init__(self, name: str, find: Callable[[], T]) -> None:
        self._name, self._began = name, time.monotonic()
        self._future: Future[T] = Future()
        threading.Thread(target=self._run, args=(find,), daemon=True, name=name).start()

    def _run(self, find: Callable[[], T]) -> None:
        try:
            self._future.set_result(find())
        except BaseException as error:  # noqa: BLE001  it is raised where the piece is waited for
            self._future.set_exception(error)

    def get(self, until: float) -> T:
        """What was found; waits until CLOCK_MONOTONIC `until`. Raises Missing."""
        try:
            return self._future.result(max(0.0, until - time.monotonic()))
        except Late:
            raise Missing(f"{self._name}: no answer in {time.monotonic() - self._began:.0f} s") from None
        except (flight.NoDump, gpus.NoReading, kernel_log.Unreadable) as error:
            raise Missing(str(error)) from error
        except Exception as error:  # whatever goes wrong with one piece, the others are wanted
            raise Missing(f"{self._name}: {type(error).__name__}: {error}") from error


class Notes:
    """Collects pieces; the reason for one that is missing goes to the list of its rank, or to the node's."""

    def __init__(self) -> None:
        self.node: list[str] = []
        self.ranks: dict[int, list[str]] = {}

    def take(self, piece: Piece[T], until: float, rank: int | None = None) -> T | None:
        """What `piece` found, or None and a note."""
        try:
            return piece.get(until)
        except Missing as missing:
            self.add(str(missing), rank)
            return None

    def add(self, note: str, rank: int | None = None) -> None:
        """Note something about a rank, or about the node."""
        self.node.append(note) if rank is None else self.ranks.setdefault(rank, []).append(note)


def collect(scene: Scene) -> Node:
    """Look twice at every rank of the node, and once at everything else."""
    clock, wall = time.monotonic(), time.time()
    notes = Notes()
    beats = _beats(scene, notes)
    variables = {rank: processes.environment(beat.pid) for rank, beat in beats.items()} if scene.gpus else {}
    log = Piece("kernel log", lambda: kernel_log.lines(clock - scene.since))
    slurm = Piece("Slurm", lambda: _slurm(scene.host, os.environ))
    stacks_before, first_gpus = _round(scene, beats, notes, clock + ROUND_S)
    before = _processes(beats, notes)
    looked = time.monotonic()
    time.sleep(scene.gap_s)
    again = time.monotonic()
    end = again + ROUND_S
    later = _beats(scene, notes)
    after = _processes(later, notes)
    dumps = _ask_for_dumps(variables, wall - clock)
    stacks_after, second_gpus = _round(scene, later, notes, end)
    rounds = _seen(beats, stacks_before, before), _seen(later, stacks_after, after)
    if (lag := again - looked - scene.gap_s) > LAG_S:
        notes.add(f"this node did not run its watcher for {lag:.0f} s while it looked")
    ends = {one.rank: one for one in heartbeat.read_ends(scene.run, scene.ranks) if one.attempt == scene.attempt}
    calls = _collectives(scene, later, dumps, end, notes)
    visible = next((found.get("CUDA_VISIBLE_DEVICES") for found in variables.values() if found), None)
    telling, said = notes.take(log, end), notes.take(slurm, end)
    return Node(
        host=scene.host,
        index=scene.index,
        attempt=scene.attempt,
        time=wall,
        clock=clock,
        gap_s=again - looked,
        ranks=tuple(
            _rank(rank, rounds, calls[rank], ends.get(rank), notes.ranks.get(rank, ())) for rank in scene.ranks
        ),
        gpus=(gpus.of_ranks(first_gpus, visible), gpus.of_ranks(second_gpus, visible)),
        idle=_baseline(gpus.at_rest(scene.run, scene.attempt, scene.host), visible),
        computing=_baseline(scene.computing, visible),
        kernel_log=telling or (),
        scheduler=said or "",
        missing=tuple(dict.fromkeys(notes.node)),
    )


def _rank(
    rank: int,
    rounds: tuple[Mapping[int, Seen], Mapping[int, Seen]],
    calls: tuple[Collective, ...],
    end: End | None,
    missing: Iterable[str],
) -> Rank:
    nothing = Seen(None, None, None, ())
    first, second = (seen.get(rank, nothing) for seen in rounds)
    return Rank(rank, (first, second), calls, end, tuple(dict.fromkeys(missing)))


def _beats(scene: Scene, notes: Notes) -> dict[int, Beat]:
    found = {beat.rank: beat for beat in heartbeat.read(scene.run, scene.ranks) if beat.attempt == scene.attempt}
    for rank in scene.ranks:
        if rank not in found:
            notes.add("no heartbeat", rank)
        elif found[rank].host != scene.host:
            notes.add(f"runs on {found[rank].host}, not on {scene.host}", rank)
    return {rank: found[rank] for rank in scene.ranks if rank in found and found[rank].host == scene.host}


def _round(
    scene: Scene, beats: Mapping[int, Beat], notes: Notes, until: float
) -> tuple[dict[int, Stack | None], tuple[Reading, ...]]:
    """All ranks' stacks and the GPUs at about the same moment."""
    reading = Piece("GPU readings", gpus.read) if scene.gpus else None
    looks = {
        rank: Piece("stacks", lambda beat=beat: stacks.sample(beat.pid, stack_file(scene.run, beat.rank)))  # type: ignore[misc]
        for rank, beat in beats.items()
        if presence.runs(beat.pid, beat.time)
    }
    found = {rank: notes.take(look, until, rank) for rank, look in looks.items()}
    return found, (notes.take(reading, until) or ()) if reading else ()


def _seen(
    beats: Mapping[int, Beat],
    found: Mapping[int, Stack | None],
    states: Mapping[int, tuple[Process, tuple[Process, ...]]],
) -> dict[int, Seen]:
    return {rank: Seen(beat, found.get(rank), *states.get(rank, (None, ()))) for rank, beat in beats.items()}


def _ask_for_dumps(
    variables: Mapping[int, Mapping[str, str]], clock_offset: float
) -> dict[int, Piece[tuple[Collective, ...]]]:
    return {
        rank: Piece("flight recorder", lambda rank=rank, found=found: flight.ask(rank, found, clock_offset))  # type: ignore[misc]
        for rank, found in variables.items()
    }


def _processes(beats: Mapping[int, Beat], notes: Notes) -> dict[int, tuple[Process, tuple[Process, ...]]]:
    """What the kernel says of the ranks. What the looking itself does to a process, stops it or has it write a dump,
    falls outside the two readings: the first comes last in its round, the second first.
    """
    pieces = {
        rank: Piece("process state", lambda beat=beat: _process(beat))  # type: ignore[misc]
        for rank, beat in beats.items()
    }
    until = time.monotonic() + PROCESS_S
    found = {rank: notes.take(piece, until, rank) for rank, piece in pieces.items()}
    return {rank: one for rank, one in found.items() if one is not None}


def _process(beat: Beat) -> tuple[Process, tuple[Process, ...]]:
    if not presence.runs(beat.pid, beat.time):
        return Process(beat.pid, "", "", "", 0.0, 0, 0, 0, ()), ()
    return processes.look(beat.pid), processes.children(beat.pid)


def _collectives(
    scene: Scene,
    beats: Mapping[int, Beat],
    dumps: Mapping[int, Piece[tuple[Collective, ...]]],
    end: float,
    notes: Notes,
) -> dict[int, tuple[Collective, ...]]:
    """Each rank's last collectives: from its ring, on GPUs with the states that NCCL's flight recorder has."""
    pieces = {
        rank: Piece("ring of collectives", lambda rank=rank: _ring(scene, rank, beats.get(rank), notes))  # type: ignore[misc]
        for rank in scene.ranks
    }
    until = time.monotonic() + PROCESS_S
    found = {rank: notes.take(piece, until, rank) or () for rank, piece in pieces.items()}
    if not scene.gpus:
        return found
    for rank, host in found.items():
        device = notes.take(dumps[rank], end, rank) if rank in dumps else None
        if not device and host:
            notes.add("whether its collectives before the last one are over on the GPU is not known", rank)
        found[rank] = flight.merge(device, host)[-ring.RECORDS :] if device else _issued(host)
    return found


def _ring(scene: Scene, rank: int, beat: Beat | None, notes: Notes) -> tuple[Collective, ...]:
    try:
        contents = ring.read(ring.path_of(scene.run, rank, scene.attempt))
    except FileNotFoundError:
        notes.add("ring of collectives: there is none", rank)
        return ()
    if beat is not None and contents.pid != beat.pid:
        notes.add(f"ring of collectives: of another process, {contents.pid}", rank)
        return ()
    if contents.torn:
        notes.add(f"ring of collectives: {contents.torn} records were being written", rank)
    return tuple(map(collective, contents.records))


def collective(record: Record) -> Collective:
    """A record of a ring as evidence."""
    return Collective(
        number=record.number,
        group=record.group,
        kind=record.kind,
        sizes=ring.shapes(record.sizes),
        dtype=record.dtype,
        where=record.where,
        state=ring.STATES[record.state],
        phase=record.phase,
        update=record.update,
        pack=record.pack,
        started=record.started,
        ended=record.ended or None,
    )


def _issued(calls: Sequence[Collective]) -> tuple[Collective, ...]:
    """Collectives on a GPU of which only the host's side is known: of all groups the last one counts as under way."""
    last = max((one.started for one in calls), default=0.0)
    return tuple(replace(one, state="done") if one.state == "called" and one.started < last else one for one in calls)


def _baseline(readings: Sequence[Reading], visible: str | None) -> tuple[Gpu, ...]:
    return gpus.of_ranks(readings, visible)


def _slurm(host: str, environment: Mapping[str, str]) -> str:
    """What Slurm says of this job and of this node; empty outside a job."""
    if "SLURM_JOB_ID" not in environment:
        return ""
    job, node = scheduler.job_id(environment), environment.get("SLURMD_NODENAME", host)
    states, silences = scheduler.job_states([job], SLURM_S)
    said = [f"job {job}: {states[job].state} ({states[job].reason})"] if job in states else silences
    try:
        said += scheduler.ask("sinfo", "-h", "-n", node, "-o", "node %N: %T (%E)", timeout_s=SLURM_S).splitlines()[:1]
    except scheduler.NoAnswer as silence:
        said.append(str(silence))
    return "; ".join(said)
