"""From two rounds of stack samples to one sentence: is the run stuck, and which rank blocks it, if that can be said.

A rank that only waits for others is never named as the culprit; where nothing better can be said, that is said.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from configs import runfolder
from prefix_train.heartbeat import Beat
from slurm import stacks
from slurm.deadlines import Overdue
from slurm.stacks import Frame, Stack

COLLECTIVE_FILES = ("/torch/distributed/",)
COLLECTIVE_NAMES = ("gloo::", "c10d::", "ProcessGroup")
NEAR = 8
"""Innermost Python frames among which a collective's are looked for."""


class Look(NamedTuple):
    """One rank in one round: its heartbeat and what could be seen of its process."""

    beat: Beat
    stack: Stack


@dataclass(frozen=True)
class Verdict:
    """What two rounds of samples say. `culprits` is empty where no rank can be named."""

    attempt: int
    stuck: bool
    culprits: tuple[int, ...]
    sentence: str
    ranks: tuple[str, ...]

    def text(self) -> str:
        """First line: the verdict. Then one line per rank."""
        return "\n".join([self.sentence, *self.ranks]) + "\n"


def judge(first: dict[int, Look], second: dict[int, Look], late: Overdue, attempt: int) -> Verdict:
    """Compare the two rounds; `late` is what gave the alarm."""
    lines = tuple(f"rank {rank}: {describe(look)}" for rank, look in sorted(second.items()))
    moved = [rank for rank, look in sorted(second.items()) if rank not in first or not same_place(first[rank], look)]
    if moved:
        return Verdict(attempt, False, (), f"not stuck: rank {moved[0]} moves; {late.sentence}", lines)
    for blames in (_stopped, _in_kernel, _holds_lock, _elsewhere):
        if culprits := [rank for rank in sorted(second) if blames(first[rank], first) and blames(second[rank], second)]:
            rank = culprits[0]
            return Verdict(
                attempt, True, tuple(culprits), f"rank {rank} {describe(second[rank])}; {late.sentence}", lines
            )
    rank, look = late.beat.rank, second.get(late.beat.rank)
    seen = f"rank {rank} {describe(look)}" if look else f"rank {rank} could not be looked at"
    return Verdict(attempt, True, (), f"no rank can be named: {seen}; {late.sentence}", lines)


def write(folder: Path, verdict: Verdict, run: Path) -> None:
    """Write verdict.txt and verdict.json into `folder`."""
    runfolder.write_text(folder / "verdict.txt", verdict.text(), run=run)
    runfolder.write_json(folder / "verdict.json", asdict(verdict), run=run)


def same_place(before: Look, after: Look) -> bool:
    """Whether a rank's heartbeat and its main thread's Python functions are the same in both rounds."""
    standing = [(look.beat.phase, look.beat.update, look.beat.pack, look.beat.completed) for look in (before, after)]
    return standing[0] == standing[1] and _functions(before.stack) == _functions(after.stack)


def describe(look: Look) -> str:
    """Where one rank is, as the end of a sentence that begins with its name."""
    frame = blocking(look.stack)
    where = f" in {frame}" if frame else ""
    where += _own_code(look.stack, frame)
    if not look.stack.state:
        return "is gone"
    if look.stack.stopped:
        return f"is stopped{where}"
    if look.stack.state == "D":
        return f"waits in the kernel ({look.stack.wchan or 'unknown'}){where}"
    if _lock_in_c(look.stack) is not None:
        return f"holds the interpreter lock{where}"
    if in_collective(look.stack):
        return f"waits for other ranks{where}"
    return f"is {stacks.STATES.get(look.stack.state, look.stack.state)}{where}" if where else "shows no frames"


def blocking(stack: Stack) -> Frame | None:
    """The innermost Python frame of the thread that matters: the one in C with the lock, else the main thread."""
    thread = _lock_in_c(stack) or stack.main
    return next(iter(stacks.python_frames(thread)), None) if thread else None


def in_collective(stack: Stack) -> bool:
    """Whether the main thread waits for other ranks."""
    if stack.main is None:
        return False
    near = stacks.python_frames(stack.main)[:NEAR]
    return any(part in frame.file for frame in near for part in COLLECTIVE_FILES) or any(
        part in frame.name for frame in stack.main.frames if frame.native for part in COLLECTIVE_NAMES
    )


def _own_code(stack: Stack, frame: Frame | None) -> str:
    """The nearest caller outside installed packages, where `frame` itself is in one."""
    if frame is None or stack.main is None or not _installed(frame):
        return ""
    caller = next((outer for outer in stacks.python_frames(stack.main) if not _installed(outer)), None)
    return f", called from {caller}" if caller else ""


def _installed(frame: Frame) -> bool:
    return "/site-packages/" in frame.file or "/lib/python" in frame.file or frame.file.startswith("<")


def _functions(stack: Stack) -> tuple[tuple[str, str], ...]:
    """Python functions of the main thread by file and bare name, which is all that every method tells."""
    frames = stacks.python_frames(stack.main) if stack.main else ()
    return tuple((frame.file, frame.name.rpartition(".")[2]) for frame in frames)


def _lock_in_c(stack: Stack) -> stacks.Thread | None:
    """The thread that has the interpreter lock while it is in C."""
    holder = stack.lock_holder
    return holder if holder and holder.frames and holder.frames[0].native else None


def _stopped(look: Look, _: dict[int, Look]) -> bool:
    return look.stack.stopped


def _in_kernel(look: Look, _: dict[int, Look]) -> bool:
    return look.stack.state == "D"


def _holds_lock(look: Look, _: dict[int, Look]) -> bool:
    return _lock_in_c(look.stack) is not None and not in_collective(look.stack)


def _elsewhere(look: Look, others: dict[int, Look]) -> bool:
    """Seen to be somewhere else than in the collective that another rank waits in."""
    waiting = any(in_collective(other.stack) for other in others.values())
    return waiting and look.stack.main is not None and not in_collective(look.stack)
