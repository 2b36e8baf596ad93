"""Evidence as the rules look at it: one view per rank of the job, whether or not anything is known of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from prefix_train.heartbeat import Beat, End
from slurm import divergence, frames
from slurm.divergence import Divergence
from slurm.evidence import Alarm, Collective, Gpu, Node, Process, Rank
from slurm.stacks import Frame, Stack, Thread

GONE = ("", "Z", "X")
BUSY = 0.2
"""Share of a core, over the gap between the rounds, from which on a process counts as computing."""
LITTLE_POWER, LITTLE_OF_ALL = 0.25, 0.5
"""A GPU that draws less than this share of the way from rest to computing does not compute; of all its power where its
reading at rest is not known."""
OCCUPIED = 90.0
"""Percent of utilisation from which on a GPU counts as occupied."""
UNTOUCHED = 5.0
"""Percent of the time; a GPU whose memory is read or written less than that does not compute."""
IO_BYTES = 1 << 12
"""Bytes that have to be read or written in the gap for reading or writing to count as going on."""


@dataclass(frozen=True)
class View:
    """One rank. known, node: None where its node gave no evidence."""

    rank: int
    host: str
    known: Rank | None
    node: Node | None

    @cached_property
    def stacks(self) -> tuple[Stack, ...]:
        """Its stacks, one per round in which there was one."""
        return tuple(seen.stack for seen in self.known.rounds if seen.stack is not None) if self.known else ()

    @property
    def stack(self) -> Stack | None:
        """Its last stack."""
        return self.stacks[-1] if self.stacks else None

    @property
    def beats(self) -> tuple[Beat, ...]:
        """Its heartbeats, one per round in which there was one."""
        return tuple(seen.beat for seen in self.known.rounds if seen.beat is not None) if self.known else ()

    @property
    def beat(self) -> Beat | None:
        """Its last heartbeat."""
        return self.beats[-1] if self.beats else None

    @property
    def process(self) -> Process | None:
        """Its process in the last round."""
        found = [seen.process for seen in self.known.rounds if seen.process is not None] if self.known else []
        return found[-1] if found else None

    @property
    def ring(self) -> tuple[Collective, ...]:
        """Its last collectives."""
        return self.known.collectives if self.known else ()

    @property
    def end(self) -> End | None:
        """How it ended."""
        return self.known.end if self.known else None

    @property
    def pending(self) -> Collective | None:
        """The collective that it waits in: the first that has not returned.

        On a GPU without the flight recorder nothing tells when any of them ended: then the last one.
        """
        called = [one for one in self.ring if one.state == "called"]
        if not called:
            return None
        return called[0] if any(one.ended is not None for one in self.ring) else called[-1]

    @property
    def answered(self) -> bool:
        """Whether anything tells where it is: frames, its collectives, or how it ended."""
        return any(stack.threads for stack in self.stacks) or bool(self.ring) or self.gone or self.stopped

    @property
    def gone(self) -> bool:
        """Whether its process has ended."""
        if self.end is not None:
            return True
        states = [stack.state for stack in self.stacks] or [self.process.state if self.process else "S"]
        return bool(self.beats) and states[-1] in GONE

    @property
    def stopped(self) -> bool:
        """Whether a signal or a tracer has stopped it, in every round."""
        return bool(self.stacks) and all(stack.stopped for stack in self.stacks)

    @cached_property
    def waits(self) -> bool:
        """Whether it waits for other ranks. A call that has not returned counts where no frames contradict it."""
        if self.gone or self.stopped:
            return False
        shown = [stack for stack in self.stacks if stack.main is not None]
        if any(frames.waits_for_ranks(stack) for stack in shown[-1:]):
            return not frames.leaves(shown[-1])
        if any(frames.tunes(stack) for stack in shown[-1:]) and not self.spins(self.gpu):
            return False  # the device measures a kernel
        return self.pending is not None and all(self._waits_for_device(stack) for stack in shown[-1:])

    @property
    def elsewhere(self) -> bool:
        """Whether it was seen to be somewhere else than in a collective, in every round."""
        return self.answered and not self.gone and not self.waits and (bool(self.stacks) or not self.pending)

    @property
    def advanced(self) -> bool:
        """Whether its heartbeat or its collectives went on between the rounds."""
        standing = {(beat.phase, beat.part, beat.update, beat.pack, beat.completed) for beat in self.beats}
        return len(standing) > 1 or any(self._after_first_round(one) for one in self.ring)

    @property
    def wandered(self) -> bool:
        """Whether the main thread, or one beside it in our own code, was in other functions in the second round."""
        shown = [frames.own_functions(stack) for stack in self.stacks if stack.main is not None]
        return len(set(shown)) > 1

    @property
    def busy(self) -> bool:
        """Whether it, or a child of it, used the processor between the rounds, or would have on a less busy node."""
        return self.cpu_share >= BUSY or self.runnable

    @property
    def runnable(self) -> bool:
        """Whether it ran or waited for a processor in both rounds."""
        return self.known is not None and all(seen.process and seen.process.state == "R" for seen in self.known.rounds)

    @property
    def cpu_share(self) -> float:
        """Cores that it and its children used between the rounds."""
        if self.known is None or self.node is None:
            return 0.0
        first, second = self.known.rounds
        before = {one.pid: one.cpu_s for one in (first.process, *first.children) if one}
        after = [one for one in (second.process, *second.children) if one]
        used = sum(one.cpu_s - before.get(one.pid, one.cpu_s) for one in after)
        return used / max(self.node.gap_s, 0.1)

    @property
    def moves_bytes(self) -> bool:
        """Whether it read or wrote between the rounds."""
        if self.known is None:
            return False
        first, second = (seen.process for seen in self.known.rounds)
        if first is None or second is None:
            return False
        return (second.read_bytes + second.written_bytes) - (first.read_bytes + first.written_bytes) >= IO_BYTES

    @property
    def alive(self) -> bool:
        """Whether anything of it went on between the rounds."""
        return self.advanced or self.wandered or self.moves_bytes

    @property
    def where(self) -> str:
        """`file:line` in our own code that matters most; empty where it is not known."""
        if self.end is not None:
            return self.end.where or ""
        frame = self.frame
        if frame is not None:
            return frames.place(frame)
        return self.pending.where if self.pending else ""

    @property
    def frame(self) -> Frame | None:
        """The frame of `where`."""
        return self.frame_of(None)

    def frame_of(self, thread: Thread | None) -> Frame | None:
        """The innermost frame of our own in `thread`; none given: in the one with the lock in C, else the main one."""
        if self.stack is None:
            return None
        thread = thread or frames.lock_in_c(self.stack) or self.stack.main
        return frames.own_frame(thread) or frames.blocking(self.stack)

    @property
    def gpu(self) -> Gpu | None:
        """The last reading of its GPU."""
        return self.gpu_in(1) or self.gpu_in(0)

    def gpu_in(self, number: int) -> Gpu | None:
        """The reading of its GPU in one of the two rounds."""
        return self._own(self.node.gpus[number]) if self.node else None

    def spins(self, now: Gpu | None) -> bool:
        """Whether its GPU is occupied in the reading `now` and does not compute, by its own other readings."""
        idle, computing = self.gpu_idle, self.gpu_computing
        if now is None or computing is None or now.power_w is None or not computing.power_w:
            return False
        if (now.utilisation or 0.0) < OCCUPIED or (now.memory_utilisation or 0.0) >= UNTOUCHED:
            return False
        rest = idle.power_w if idle is not None and idle.power_w is not None else 0.0
        share = (now.power_w - rest) / max(computing.power_w - rest, 1.0)
        return share <= (LITTLE_POWER if rest else LITTLE_OF_ALL)

    @property
    def gpu_idle(self) -> Gpu | None:
        """Its GPU at rest."""
        return self._own(self.node.idle) if self.node else None

    @property
    def gpu_computing(self) -> Gpu | None:
        """Its GPU in a finished update."""
        return self._own(self.node.computing) if self.node else None

    def wall(self, clock: float) -> float:
        """Seconds since 1970 at `clock` of its node."""
        return self.node.time + clock - self.node.clock if self.node else clock

    def _waits_for_device(self, stack: Stack) -> bool:
        return frames.waits_for_device(stack) or (frames.launches(stack) and self.spins(self.gpu))

    def _own(self, readings: Sequence[Gpu]) -> Gpu | None:
        if self.node is None:
            return None
        local = next(place for place, one in enumerate(self.node.ranks) if one.rank == self.rank)
        return readings[local] if local < len(readings) else None

    def _after_first_round(self, one: Collective) -> bool:
        return self.node is not None and max(one.started, one.ended or 0.0) > self.node.clock


@dataclass(frozen=True)
class Case:
    """All that is known when a verdict is asked for."""

    views: tuple[View, ...]
    nodes: tuple[Node, ...]
    alarm: Alarm

    @property
    def waiting(self) -> list[View]:
        """Ranks that wait for others."""
        return [view for view in self.views if view.waits]

    @property
    def elsewhere(self) -> list[View]:
        """Ranks that were seen to be somewhere else."""
        return [view for view in self.views if view.elsewhere]

    @property
    def silent(self) -> list[View]:
        """Ranks of which nothing says where they are."""
        return [view for view in self.views if not view.answered]

    @property
    def ended(self) -> list[View]:
        """Ranks that have left a word of how they ended, the first one first."""
        found = [(view.end.time, view.rank, view) for view in self.views if view.end is not None]
        return [view for _, _, view in sorted(found, key=lambda item: item[:2])]

    @property
    def advanced(self) -> bool:
        """Whether the run itself went on between the rounds."""
        return any(view.advanced for view in self.views)

    @cached_property
    def divergence(self) -> Divergence | None:
        """Where the ranks' collectives first differ."""
        return divergence.earliest({view.rank: view.ring for view in self.views if view.ring})

    @property
    def kernel_log(self) -> list[tuple[Node, str]]:
        """Lines of the nodes' kernel logs."""
        return [(node, line) for node in self.nodes for line in node.kernel_log]

    def view(self, rank: int) -> View:
        """The view of one rank."""
        return self.views[rank]


def case(nodes: Iterable[Node], alarm: Alarm, world: int, hosts: Sequence[str]) -> Case:
    """The views of ranks 0 to `world` - 1; `hosts`: the job's nodes in order, over which ranks are spread evenly."""
    nodes = tuple(nodes)
    known = {rank.rank: (rank, node) for node in nodes for rank in node.ranks}
    per_node = max(1, world // max(1, len(hosts)))
    views = []
    for number in range(world):
        rank, node = known.get(number, (None, None))
        host = node.host if node else (hosts[min(number // per_node, len(hosts) - 1)] if hosts else "?")
        views.append(View(number, host, rank, node))
    return Case(tuple(views), nodes, alarm)
