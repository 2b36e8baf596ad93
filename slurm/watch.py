"""`python -m slurm.watch RUN`: the process beside the ranks of one node.

It reads the heartbeats and nothing else while all is well. A rank that is past its deadline has every rank's stacks
taken, twice, into hangs/<n>/; only if nothing moved between the two rounds is the run called stuck and its ranks are
ended. Where one rank ends badly, the others, which would wait for it, are ended too.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
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
from prefix_train.heartbeat import Beat
from slurm import deadlines, presence, sampled, stacks
from slurm.deadlines import Overdue
from slurm.finish import ENDED_WELL, HUNG
from slurm.rank import stack_file
from slurm.sampled import Look, Verdict

GRACE_S = 5.0
"""Time for the other ranks to end by themselves, and to say why, after one has ended badly."""
SETTLE_S = 1.0
"""Time for a rank's parent to write down how it ended."""
SAVE_SHARE = 0.7
"""Part of `slurm.signal_delay_s` that ranks may use for saving; the rest is for evidence and for the batch script."""
RANK_ENDED = 1
"""Exit status after a rank that ended badly."""


class Watcher:
    """Watches the ranks `expected` of this node in life `attempt` of the run.

    `parent`: process id of a local run's driver; where that is gone, the ranks are ended too. `save_within_s`: how long
    ranks that were asked to save may take for it. `node`: index of this node in the job.
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
    ) -> None:
        self.run, self.watch, self.expected, self.attempt = run, watch, frozenset(expected), attempt
        self.host, self.parent, self.node = socket.gethostname(), parent, node
        self.began = time.monotonic()
        self.patience = 1.0
        """Grows when an alarm turned out false, so that slow ranks are not sampled at every poll."""
        self.gone_since: dict[int, float] = {}
        self.bad_since: float | None = None
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
                return status
            time.sleep(self.watch.poll_s)

    def poll(self) -> int | None:
        """Look once; an exit status when there is nothing left to watch."""
        runfolder.check_attempt(self.run)
        beats = {beat.rank: beat for beat in self._beats() if beat.rank in self.expected}
        if self.parent is not None and os.getppid() != self.parent:
            end_ranks(beats.values())
            return RANK_ENDED
        self._record_gone(beats)
        ends = {end.rank: end for end in heartbeat.read_ends(self.run) if end.attempt == self.attempt}
        running = {rank: beat for rank, beat in beats.items() if rank not in ends and self._may_run(beat)}
        if ends.keys() >= self.expected:
            return RANK_ENDED if any(ends[rank].status not in ENDED_WELL for rank in self.expected) else 0
        if any(end.status not in ENDED_WELL for end in ends.values()):
            return self._end_after_bad(running)
        if running and self.told is not None and time.monotonic() - self.told > self.save_within_s:
            return self._end_unsaved(running)
        late = deadlines.overdue(running.values(), self.watch, self.host, time.monotonic(), time.time())
        late = [item for item in late if item.age > item.limit * self.patience]
        if late:
            return self._investigate(late[0], running)
        return self._check_silent(beats.keys() | ends.keys())

    def _may_run(self, beat: Beat) -> bool:
        return beat.host != self.host or is_alive(beat)

    def _beats(self) -> list[Beat]:
        return [beat for beat in heartbeat.read(self.run) if beat.attempt == self.attempt]

    def _record_gone(self, beats: dict[int, Beat]) -> None:
        """Write the end of ranks that are gone and were killed together with their parents: only SIGKILL does that."""
        recorded = {end.rank for end in heartbeat.read_ends(self.run) if end.attempt == self.attempt}
        now = time.monotonic()
        for rank, beat in beats.items():
            if rank in recorded or self._may_run(beat):
                self.gone_since.pop(rank, None)
            elif now - self.gone_since.setdefault(rank, now) > SETTLE_S:
                heartbeat.ended(self.run, rank, beat.world, signal=signal.SIGKILL, host=beat.host, pid=beat.pid)

    def _end_after_bad(self, running: dict[int, Beat]) -> int | None:
        """Give the others a moment to end by themselves, then end them."""
        now = time.monotonic()
        if self.bad_since is None:
            self.bad_since = now
        if now - self.bad_since < GRACE_S:
            return None
        end_ranks(running.values())
        return RANK_ENDED

    def _check_silent(self, heard: Iterable[int]) -> int | None:
        """Ranks that never gave a heartbeat: there is no process that could be looked at."""
        waited = time.monotonic() - self.began
        silent = sorted(self.expected - set(heard))
        if not silent or waited <= self.watch.load_s:
            return None
        sentence = f"rank {silent[0]} gave no heartbeat in {waited:.0f} s; its deadline was {self.watch.load_s:.0f} s"
        sampled.write(self._new_folder(), Verdict(self.attempt, True, tuple(silent), sentence, ()), self.run)
        print(sentence, file=sys.stderr, flush=True)
        end_ranks(self._beats())
        return HUNG

    def _investigate(self, late: Overdue, running: dict[int, Beat]) -> int | None:
        """Take the evidence; end the ranks if two rounds of samples agree that nothing moves."""
        folder = self._new_folder()
        first = self._look(running)
        time.sleep(self.watch.sample_gap_s)
        second = self._look({beat.rank: beat for beat in self._beats() if beat.rank in running})
        found = sampled.judge(first, second, late, self.attempt)
        for rank in sorted(first.keys() | second.keys()):
            rounds = [(name, looks.get(rank)) for name, looks in (("first", first), ("second", second))]
            text = "\n".join(_render(name, look, self.watch.sample_gap_s) for name, look in rounds if look)
            runfolder.write_text(folder / f"rank{rank}.txt", text, run=self.run)
        sampled.write(folder, found, self.run)
        print(f"{found.sentence}; see {folder}", file=sys.stderr, flush=True)
        if not found.stuck:
            self.patience *= 2
            return None
        end_ranks(look.beat for look in second.values())
        return HUNG

    def _end_unsaved(self, running: dict[int, Beat]) -> int:
        """End ranks that do not get to save, so that the batch script is left some time to act."""
        looks = self._look(running)
        beat = min(running.values(), key=lambda beat: (beat.update, beat.rank))
        sentence = (
            f"asked to save {self.save_within_s:.0f} s ago, rank {beat.rank} is still in phase {beat.phase} "
            f"of update {beat.update}"
        )
        lines = tuple(f"rank {rank}: {sampled.describe(look)}" for rank, look in sorted(looks.items()))
        sampled.write(self._new_folder(), Verdict(self.attempt, True, (), sentence, lines), self.run)
        print(sentence, file=sys.stderr, flush=True)
        end_ranks(running.values())
        return HUNG

    def _look(self, beats: dict[int, Beat]) -> dict[int, Look]:
        """All ranks of this node at the same moment."""
        here = [beat for beat in beats.values() if beat.host == self.host]
        with ThreadPoolExecutor(max_workers=max(1, len(here))) as pool:
            found = pool.map(lambda beat: stacks.sample(beat.pid, stack_file(self.run, beat.rank)), here)
            return {beat.rank: Look(beat, stack) for beat, stack in zip(here, found, strict=True)}

    def _new_folder(self) -> Path:
        """hangs/<n>, the first n that is free."""
        hangs = self.run / runfolder.HANGS
        hangs.mkdir(exist_ok=True)
        for number in count(1):
            try:  # watchers of other nodes may be looking for one at this moment
                (hangs / str(number)).mkdir()
            except FileExistsError:
                continue
            return hangs / str(number)
        raise AssertionError("there is always a next number")


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


def _render(name: str, look: Look, gap_s: float) -> str:
    beat, when = look.beat, f"{gap_s:g} s later" if name == "second" else time.strftime("%F %T")
    standing = f"phase {beat.phase} ({beat.part}), update {beat.update}, pack {beat.pack}, host {beat.host}"
    return f"== {name} sample, {when}: rank {beat.rank}, {standing}\n{stacks.render(look.stack)}"


app = make_app("Watch the ranks of this node. Called by the job, not by people. Example: python -m slurm.watch runs/x")


@app.command()
def main(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    parent: Annotated[int | None, typer.Option(help="End the ranks when this process is no longer the parent.")] = None,
) -> int:
    """Exit with 0 when all ranks ended well, 1 after one that did not, 79 after a hang."""
    config = from_run(run)
    node, within = node_index(config, os.environ), SAVE_SHARE * config.slurm.signal_delay_s
    ranks = expected_ranks(config, node)
    watcher = Watcher(run, config.watch, ranks, runfolder.process_attempt(), parent, within, node)
    if config.cluster == "slurm":
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, watcher.hear)
    return watcher.watch_all()


if __name__ == "__main__":
    run_app(app)
