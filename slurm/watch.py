"""`python -m slurm.watch RUN`: the process beside the ranks of one node.

It reads the heartbeats and nothing else while all is well. A rank that is past its deadline raises an alarm: the
watchers of all nodes take evidence into hangs/<n>/, one of them judges it, and each ends its own ranks only if the
verdict says so. Where one rank ends badly, the others, which would wait for it, are ended too.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from configs import runfolder
from configs.compose import from_run
from configs.console import make_app
from configs.console import run as run_app
from configs.schema import Config, WatchConfig
from prefix_train import heartbeat
from prefix_train.heartbeat import Beat, End
from slurm import alarms, collect, deadlines, evidence, gpus, presence, verdict
from slurm.alarms import look_now as look_now
from slurm.deadlines import Overdue, Pauses
from slurm.evidence import Alarm
from slurm.finish import ENDED_WELL, HUNG
from slurm.verdict import Verdict

GRACE_S = 5.0
"""Time for the other ranks to end by themselves, and to say why, after one has ended badly."""
END_GAP_S = 1.0
"""Time between two looks at ranks that wait for one that has ended."""
SETTLE_S = 1.0
"""Time for a rank's parent to write down how it ended."""
SAVE_SHARE = 0.7
"""Part of `slurm.signal_delay_s` that ranks may use for saving; the rest is for evidence and for the batch script."""
ELSEWHERE_S = 3.0
"""How often it is looked whether a rank of another node has ended badly."""
RANK_ENDED = 1
"""Exit status after a rank that ended badly."""


class Watcher:
    """Watches the ranks `expected` of this node in life `attempt` of the run.

    `parent`: process id of a local run's driver; where that is gone, the ranks are ended too. `save_within_s`: how long
    ranks that were asked to save may take for it. `node`: index of this node in the job. `has_gpus`: whether the ranks
    compute on GPUs.
    """

    def __init__(
        self,
        run: Path,
        watch: WatchConfig,
        expected: Iterable[int],
        attempt: int,
        parent: int | None = None,
        save_within_s: float = math.inf,
        node: int = 0,
        has_gpus: bool = False,
    ) -> None:
        self.run, self.watch, self.expected, self.attempt = run, watch, frozenset(expected), attempt
        self.host, self.parent, self.node = socket.gethostname(), parent, node
        self.began = time.monotonic()
        self.patience = 1.0
        """Grows when an alarm turned out false, so that slow ranks are not looked at all the time."""
        self.progress = 0
        """Updates that the ranks of this node have finished; once there are more, patience is what it was."""
        self.pauses = Pauses(watch.poll_s)
        self.suspects: dict[int, int] = {}
        """Polls in a row that found a rank past its deadline."""
        self.answered: dict[Path, float] = {}
        """Alarms that evidence was given for, and from when on the other nodes' is waited for."""
        self.obeyed: set[Path] = set()
        """Alarms whose verdict was acted on, and those of earlier lives."""
        self.has_gpus, self.computing = has_gpus, gpus.Computing()
        self.gone_since: dict[int, float] = {}
        self.bad_since: float | None = None
        self.looked_elsewhere, self.ended_elsewhere = -math.inf, list[End]()
        self.save_within_s = save_within_s
        self.said = -math.inf
        """When this watcher last said that it is there."""
        self.told: float | None = None
        """When the ranks of this node were asked to save, which this process hears too."""

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Take the signal that Slurm sends to every task before the time limit, or for a preemption."""
        self.told = self.told or time.monotonic()

    def watch_all(self) -> int:
        """Poll until all ranks of this node have ended; returns the exit status."""
        while True:
            if time.monotonic() - self.said > presence.BEAT_S:
                presence.say(self.run, self.node)
                self.said = time.monotonic()
            status = self.poll()
            if status is not None:
                presence.leave(self.run, self.node)
                return status
            time.sleep(self.watch.poll_s)

    def poll(self) -> int | None:
        """Look once; an exit status when there is nothing left to watch."""
        runfolder.check_attempt(self.run)
        self.pauses.tick(time.monotonic())
        beats = self._beats()
        if self.parent is not None and os.getppid() != self.parent:
            end_ranks(beats.values())
            return RANK_ENDED
        ends = {end.rank: end for end in self._ends(self.expected)}
        running = {rank: beat for rank, beat in beats.items() if rank not in ends and self._may_run(beat)}
        self._record_gone([beat for rank, beat in beats.items() if rank not in ends and rank not in running])
        if ends.keys() >= self.expected:
            return self._end_all(ends.values())
        for folder in verdict.folders(self.run):
            if folder not in self.obeyed:
                return self._attend(folder, running)
        if any(end.status not in ENDED_WELL for end in [*ends.values(), *self._elsewhere()]):
            return self._end_after_bad(running)
        if (alarm := self._suspicion(beats, running, ends.keys())) is not None:
            alarms.raise_one(self.run, alarm)
        return None

    def _may_run(self, beat: Beat) -> bool:
        return beat.host != self.host or is_alive(beat)

    def _beats(self) -> dict[int, Beat]:
        """The last word of each rank of this node."""
        return {beat.rank: beat for beat in heartbeat.read(self.run, self.expected) if beat.attempt == self.attempt}

    def _ends(self, ranks: Iterable[int] | None = None) -> list[End]:
        return [end for end in heartbeat.read_ends(self.run, ranks) if end.attempt == self.attempt]

    def _elsewhere(self) -> list[End]:
        """How ranks of other nodes ended, as of a moment ago."""
        if time.monotonic() - self.looked_elsewhere > ELSEWHERE_S:
            self.looked_elsewhere, self.ended_elsewhere = time.monotonic(), self._ends()
        return self.ended_elsewhere

    def _record_gone(self, gone: Sequence[Beat]) -> None:
        """Write the end of ranks that were killed together with their parents: only SIGKILL does that."""
        now = time.monotonic()
        since = {beat.rank: self.gone_since.get(beat.rank, now) for beat in gone}
        for beat in gone:
            if now - since[beat.rank] > SETTLE_S:
                heartbeat.ended(self.run, beat.rank, beat.world, signal=signal.SIGKILL, host=beat.host, pid=beat.pid)
        self.gone_since = since

    def _end_all(self, ends: Iterable[End]) -> int:
        """All ranks of this node have ended; after a bad end what they did last tells who began."""
        if all(end.status in ENDED_WELL for end in ends):
            return 0
        self._see_end(0.0)
        return RANK_ENDED

    def _end_after_bad(self, running: dict[int, Beat]) -> int | None:
        """Give the others a moment to end by themselves, then end them."""
        now = time.monotonic()
        if self.bad_since is None:
            self.bad_since = now
        if now - self.bad_since < GRACE_S:
            return None
        self._see_end(min(END_GAP_S, self.watch.sample_gap_s))
        end_ranks(running.values())
        return RANK_ENDED

    def _see_end(self, gap_s: float) -> None:
        """Keep what this node has of a bad end: the ranks' last collectives, and where those are that still wait."""
        node = collect.collect(replace(self._scene(), gap_s=gap_s))
        evidence.write(evidence.of_end(self.run, self.attempt), node, self.run)

    def _suspicion(self, beats: Mapping[int, Beat], running: Mapping[int, Beat], ended: Iterable[int]) -> Alarm | None:
        """Why evidence should be taken now; None: all is well."""
        if running and self.told is not None and time.monotonic() - self.told > self.save_within_s:
            beat = min(running.values(), key=lambda beat: (beat.update, beat.rank))
            sentence = (
                f"asked to save {self.save_within_s:.0f} s ago, rank {beat.rank} is still in phase {beat.phase} "
                f"of update {beat.update}"
            )
            return self._alarm(sentence, beat.rank, time.monotonic() - self.told, self.save_within_s, must_end=True)
        if (late := self._overdue(running)) is not None:
            return self._alarm(late.sentence, late.beat.rank, late.age, late.limit)
        waited = time.monotonic() - self.began
        if waited > self.watch.load_s and (silent := sorted(self.expected - beats.keys() - set(ended))):
            limit = self.watch.load_s
            sentence = f"rank {silent[0]} gave no heartbeat in {waited:.0f} s; its deadline was {limit:.0f} s"
            return self._alarm(sentence, silent[0], waited, limit, must_end=True)
        return None

    def _overdue(self, running: Mapping[int, Beat]) -> Overdue | None:
        """The rank that is furthest past its deadline, seen to be so in two polls that came in time.

        A watcher that the machine did not let run accuses nobody: its pauses were those of the ranks too.
        """
        progress = sum(beat.completed for beat in running.values())
        if progress > self.progress:
            self.progress, self.patience = progress, 1.0
        late = deadlines.overdue(running.values(), self.watch, self.host, time.monotonic(), time.time(), self.pauses)
        late = [item for item in late if item.age > item.limit * self.patience]
        if self.pauses.now:
            return None
        self.suspects = {item.beat.rank: self.suspects.get(item.beat.rank, 0) + 1 for item in late}
        if not late and self.has_gpus and running and all(map(deadlines.is_warm, running.values())):
            self.computing.take()
        return next((item for item in late if self.suspects[item.beat.rank] > 1), None)

    def _alarm(self, sentence: str, rank: int, age: float, limit: float, must_end: bool = False) -> Alarm:
        return Alarm(self.attempt, self.host, rank, age, limit, sentence, time.time(), self.node, must_end)

    def _attend(self, folder: Path, running: Mapping[int, Beat]) -> int | None:
        """Answer an alarm, judge it if it is this watcher's turn, act on its verdict."""
        alarm, found = evidence.read_alarm(folder), verdict.load(folder)
        if alarm is None or alarm.attempt != self.attempt:
            if alarm is not None or found is not None or alarms.is_stale(folder):
                self.obeyed.add(folder)
            return None
        if found is None and folder not in self.answered:
            began = time.monotonic()
            evidence.write(folder, collect.collect(self._scene()), self.run)
            self.answered[folder] = alarms.waiting_since(alarm, began, time.monotonic())
            self.pauses.rest()
        if found is None:
            found = self._judge(folder, alarm)
        return None if found is None else self._obey(folder, alarm, found, running)

    def _judge(self, folder: Path, alarm: Alarm) -> Verdict | None:
        beats, per_node = self._beats(), len(self.expected)
        world = max((beat.world for beat in beats.values()), default=per_node)
        ended = {end.rank for end in self._ends()}
        alive = {rank // per_node for rank in range(world) if rank not in ended}
        awaited, waited = alive - evidence.answered(folder), time.monotonic() - self.answered[folder]
        if not alarms.is_my_turn(alarm, self.node, not awaited, waited):
            return None
        found = alarms.conclude(self.run, folder, alarm, world, self._hosts(world // per_node))
        verdict.write(folder, found, self.run)
        took = f"Noticed after {alarm.age:.0f} s, judged {time.time() - alarm.time:.0f} s later; see {folder}"
        print(f"{found.sentence} {took}", file=sys.stderr, flush=True)
        return found

    def _obey(self, folder: Path, alarm: Alarm, found: Verdict, running: Mapping[int, Beat]) -> int | None:
        self.obeyed.add(folder)
        if found.ends:
            end_ranks(running.values())
            return HUNG
        if not alarm.only_look:
            self.patience *= 2
        return None

    def _hosts(self, nodes: int) -> tuple[str, ...]:
        found = [presence.read(self.run, node) for node in range(nodes)]
        return tuple(one.host if one else self.host if node == self.node else "?" for node, one in enumerate(found))

    def _scene(self) -> collect.Scene:
        return collect.Scene(
            run=self.run,
            attempt=self.attempt,
            host=self.host,
            index=self.node,
            ranks=tuple(sorted(self.expected)),
            gap_s=self.watch.sample_gap_s,
            since=self.began,
            gpus=self.has_gpus,
            computing=self.computing.readings,
        )


def is_alive(beat: Beat) -> bool:
    """Whether the process that gave `beat` runs."""
    return presence.runs(beat.pid, beat.time)


def end_ranks(beats: Iterable[Beat]) -> None:
    """Kill the ranks of this node: what is stuck in C or stopped hears nothing else."""
    host = socket.gethostname()
    for beat in beats:
        if beat.host == host and is_alive(beat):
            os.kill(beat.pid, signal.SIGKILL)


def node_index(config: Config, environment: Mapping[str, str]) -> int:
    """Which of the job's nodes this is."""
    return int(environment.get("SLURM_NODEID", "0")) if config.cluster == "slurm" else 0


def expected_ranks(config: Config, node: int) -> range:
    """The ranks of the node with that index."""
    per_node = config.slurm.tasks_per_node
    return range(node * per_node, (node + 1) * per_node)


app = make_app("Watch the ranks of this node. Called by the job, not by people. Example: python -m slurm.watch runs/x")


@app.command()
def main(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    parent: Annotated[int | None, typer.Option(help="End the ranks when this process is no longer the parent.")] = None,
) -> int:
    """Exit with 0 when all ranks ended well, 1 after one that did not, 79 after a hang."""
    config = from_run(run)
    node, within = node_index(config, os.environ), SAVE_SHARE * config.slurm.signal_delay_s
    ranks, has_gpus = expected_ranks(config, node), config.slurm.gpus_per_node > 0
    watcher = Watcher(run, config.watch, ranks, runfolder.process_attempt(), parent, within, node, has_gpus)
    if config.cluster == "slurm":
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, watcher.hear)
    return watcher.watch_all()


if __name__ == "__main__":
    run_app(app)
