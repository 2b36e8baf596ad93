"""Single signs that rules are made of: what one rank, or one line of a log, says. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slurm import causes, divergence, wording
from slurm.evidence import Gpu
from slurm.stacks import Thread, python_frames
from slurm.views import Case, View

EXCUSED = 4.0
"""A rank that moves without getting anywhere is left alone up to this many times its deadline."""
OUT_OF_MEMORY = re.compile(r"out of memory|oom[-_]kill|oom_reaper", re.IGNORECASE)
KILLED_PID = re.compile(r"(?:[Kk]illed process|pid=|task=\S+,pid=)\s*(\d+)")
XID = re.compile(r"\bXid\b.*?: *(\d+)", re.IGNORECASE)
DATA_FILES = re.compile(r"/prefix_train/(feed|data|images|collate|render|tokens)\.py$|/PIL/")
SAVE_FILES = re.compile(r"/prefix_train/(checkpoint|export|tensors)\.py$")
BLOCKED_IN = re.compile(r"nfs|fuse|rpc_wait|lustre|ceph|gpfs|folio_wait|wait_on_page|io_schedule|jbd2|request_wait")
"""Kernel functions in which a process waits for a file system."""
ALWAYS_OPEN = re.compile(r"/logs/rank\d+\.|/rings/")
"""A rank's own log and ring."""
ENDED_WELL = (0, 3)
STALLED_BEFORE = 0.5
"""An update that took this share of the present age, and finished, is precedent for a slow update."""
RANK = re.compile(r"\brank (\d+)\b")
SLOW_CLOCK = 0.8
"""A GPU below this share of the clock that it had in a finished update is slow."""
ENOUGH = 10
"""Finished collectives below which nothing is said of who is late."""


def stalled_before(case: Case) -> bool:
    """Whether finished updates have taken as long as this one has by now."""
    age, shown = case.alarm.age, [view.beat.durations for view in case.views if view.beat and view.beat.durations]
    return age > 0 and bool(shown) and max(map(max, shown)) >= STALLED_BEFORE * age and age <= case.alarm.limit


def waiting_share(view: View) -> tuple[float, float] | None:
    """Part of the time of its ring in which the rank was in collectives, and the longest one's part of that.

    Only up to the first look: looking stops a process for a moment, and the others then wait for it.
    """
    looked = view.node.clock if view.node else 0.0
    spans = [(one.started, one.ended) for one in view.ring if one.ended is not None and one.ended <= looked]
    if len(spans) < ENOUGH:
        return None
    waits = [ended - started for started, ended in spans]
    whole = max(ended for _, ended in spans) - min(started for started, _ in spans)
    return sum(waits) / max(whole, 1e-9), max(waits) / max(sum(waits), 1e-9)


def clock(view: View) -> str:
    """That its GPU runs slower than it did, where the readings say so."""
    now, before = view.gpu, view.gpu_computing
    if now is None or before is None or not _slow_clock(now, before):
        return ""
    return f"; its GPU runs at {now.sm_clock_mhz:.0f} MHz against {before.sm_clock_mhz:.0f} MHz before"


def computes_slowly(view: View) -> bool:
    """Whether its GPU computes far below its own clock in both rounds."""
    before, rounds = view.gpu_computing, (view.gpu_in(0), view.gpu_in(1))
    return before is not None and all(
        now is not None and bool(now.memory_utilisation) and _slow_clock(now, before) for now in rounds
    )


def spin_together(views: Sequence[View]) -> bool:
    """Whether all their GPUs spin in one of the rounds."""
    return any(all(view.spins(view.gpu_in(number)) for view in views) for number in (0, 1))


def _slow_clock(now: Gpu, before: Gpu) -> bool:
    if not now.sm_clock_mhz or not before.sm_clock_mhz:
        return False
    return now.sm_clock_mhz <= SLOW_CLOCK * before.sm_clock_mhz


def unexcused(case: Case) -> bool:
    """Whether the alarm's rank is so late that moving is no excuse any more."""
    return case.alarm.limit > 0 and case.alarm.age > EXCUSED * case.alarm.limit


def furthest_behind(case: Case) -> list[View]:
    """Of the ranks that are elsewhere those with the fewest collectives behind them."""
    groups = {one.group for view in case.waiting for one in [view.pending] if one is not None}
    rings = {view.rank: view.ring for view in case.elsewhere if view.ring}
    for group in sorted(groups):
        last = divergence.last_numbers(rings, group)
        if len(last) == len(case.elsewhere) and last:
            return [view for view in case.elsewhere if last[view.rank] == min(last.values())]
    return case.elsewhere


def behind(case: Case, view: View) -> str:
    """How many collectives it is behind those that wait."""
    waiting = [one for one in (other.pending for other in case.waiting) if one is not None]
    if not waiting or not view.ring:
        return ""
    mine = divergence.last_numbers({view.rank: view.ring}, waiting[0].group).get(view.rank)
    if mine is None:
        return ""
    behind = max(one.number for one in waiting if one.group == waiting[0].group) - mine
    return f", {behind} collective{'s' * (behind > 1)} behind" if behind > 0 else ""


def in_save(view: View) -> bool:
    """Whether a rank is in a checkpoint, by its phase or its frames."""
    return bool(view.beat and view.beat.phase == "save") or in_files(view, SAVE_FILES) is not None


def in_files(view: View, files: re.Pattern[str]) -> Thread | None:
    """The thread to look at where the main thread is, in every round, below a frame in one of `files`.

    A thread beside it that works there, in the main thread's place, comes before the main thread.
    """
    if not view.stacks or not all(below(stack.main, files) for stack in view.stacks):
        return None
    stack = view.stacks[-1]
    return next((one for one in stack.threads if not one.main and below(one, files)), stack.main)


def below(thread: Thread | None, files: re.Pattern[str]) -> bool:
    """Whether a thread is in, or was called from, one of `files`."""
    return thread is not None and any(files.search(frame.file) for frame in python_frames(thread))


def blocked(view: View) -> bool:
    """Whether a rank waits in the kernel for a file system, in every round."""
    if view.known is None:
        return False
    seen = [one.process for one in view.known.rounds if one.process is not None]
    return bool(seen) and all(one.state == "D" or BLOCKED_IN.search(one.wchan) for one in seen)


def files(view: View) -> str:
    """The files that it has open, besides its own log and ring, as part of a sentence."""
    files = [file for file in view.process.blocked_files if not ALWAYS_OPEN.search(file)] if view.process else []
    return f"; open: {', '.join(files[:2])}" if files else ""


def names(line: str, view: View) -> bool:
    """Whether a line of the kernel's log says that this rank was killed for lack of memory."""
    pids = {view.beat.pid if view.beat else None, view.end.pid if view.end else None}
    return bool(OUT_OF_MEMORY.search(line)) and any(int(pid) in pids for pid in KILLED_PID.findall(line))


def xid(case: Case, views: Sequence[View]) -> str:
    """What its node's kernel says of GPUs, as part of a sentence."""
    hosts = {view.host for view in views}
    found = [line for node, line in case.kernel_log if node.host in hosts and XID.search(line)]
    return f"; its node's kernel says: {found[0].strip()}" if found else ""


def what(view: View) -> tuple[str | None, str | None]:
    """Type and message of its exception."""
    return (view.end.exception, view.end.message) if view.end else (None, None)


def named_by(view: View) -> int | None:
    """The only rank that a rank's exception speaks of; none where it speaks of none, or of several."""
    ranks = {int(number) for number in RANK.findall((view.end.message or "") if view.end else "")}
    return ranks.pop() if len(ranks) == 1 else None


def message(view: View) -> str:
    """Its exception's message, short."""
    return wording.brief(view.end.message or "") if view.end else ""


def lost(view: View) -> bool:
    """Whether all that it says is that it lost a connection."""
    return view.end is not None and causes.lost_connections(view.end)


def bad_status(view: View) -> bool:
    """Whether it ended with a bad status and no exception."""
    return view.end is not None and view.end.exception is None and view.end.status not in ENDED_WELL


def by_place(ring: divergence.Ring) -> dict[str, int]:
    """How often the ring has a call from each place."""
    counts: dict[str, int] = {}
    for one in ring:
        counts[one.where] = counts.get(one.where, 0) + 1
    return counts
