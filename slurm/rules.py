"""The rules of a verdict, in order: the first one that finds something has the word. Pure.

A rule looks at the case and says what it is, or nothing. None of them names a rank that only waits. What ended comes
first, then what is slow and not stuck, then what is stuck, from the surest sign to the mere absence of one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import median

from configs.wording import counted
from slurm import causes, frames, memory, signs, unequal, wording
from slurm.finding import Finding, Kind, Rule, Sure
from slurm.views import Case, View

LINK = re.compile(r"\bXid\b.*: 74,|link (is )?down|mlx5|ib\d: |nvlink|NIC|network unreachable", re.IGNORECASE)
MEASURED = (
    "`python -m preflight show RUN` says what pairs of nodes reached before training; in a job of the same shape "
    "`srun python -m preflight collectives RUN` measures again and `python -m preflight judge RUN --ranks N` tells"
)
"""What to do where connections are in doubt."""
WAITS_LITTLE, WAITS_MUCH = 0.2, 0.3
"""A straggler waits for others less than this share of what they wait; they wait at least that share of the time."""
ONCE = 0.4
"""Where one wait makes up more than this share of all, the rank was late once, which makes no straggler."""


def oom_killed(case: Case) -> Finding | None:
    """The kernel ended a process for lack of memory."""
    for view in case.views:
        end = view.end
        killed = end is not None and end.signal == "SIGKILL"
        if not killed and not (view.gone and end is None):
            continue
        told = (end.message or "") if end is not None else ""
        said = told if told.startswith(memory.SAID) else None
        line = said or next((line for _, line in case.kernel_log if signs.names(line, view)), None)
        if line:
            clause = f"{wording.name([view])} was killed because memory ran out ({line.strip()})"
            advice = "give the job more memory (slurm.mem), or lower pack.max_positions"
            return Finding("oom_killed", (view.rank,), clause, view.where, advice=advice)
    return None


def raised(case: Case) -> Finding | None:
    """A rank's own traceback is the cause; what others say of lost connections, or of that rank, is not."""
    told = [view for view in case.ended if view.end and view.end.exception and not signs.lost(view)]
    if not told:
        return None
    own = [view for view in told if signs.named_by(view) in (None, view.rank)]
    first = (own or told)[0]
    assert first.end is not None
    same = [view for view in told if view.end and (view.end.exception, view.end.message) == signs.what(first)]
    advice = f"read the traceback in logs/rank{first.rank}.log"
    named = signs.named_by(first)
    if (mistake := causes.mistake(first.end)) is not None:
        advice = "put that right, then go on: python -m slurm.submit RUN; or submit the configuration anew"
        ranks = () if len(same) == len(case.views) or named is None else (named,)
        clause = f"error: {mistake.rstrip('.')}"
        return Finding("rank_raised", ranks, clause, first.where, advice=advice)
    if len(same) > 1 and len(same) == len(case.views):
        clause = f"all {len(same)} ranks agreed to stop: each {wording.ended(first)}"
        return Finding("rank_raised", () if named is None else (named,), clause, first.where, advice=advice)
    clause = f"{wording.name([first])} {wording.ended(first)}"
    return Finding("rank_raised", (first.rank if named is None else named,), clause, first.where, advice=advice)


def died(case: Case) -> Finding | None:
    """A rank's process is gone, by a signal or without a word; of several the first.

    An abort names nobody where the rank's collectives are not known: sizes that differ abort innocents too.
    """
    for view in case.ended:
        end = view.end
        assert end is not None
        if end.signal not in (None, "SIGTERM", "SIGUSR2") or (end.signal is None and signs.bad_status(view)):
            clause = f"{wording.name([view])} {wording.ended(view)}{signs.xid(case, [view])}"
            if end.signal == "SIGABRT" and not view.ring and len(case.views) > 1:
                clause += "; whether its collectives fitted the others' is not known"
                return Finding("rank_died", (), clause, view.where, sure="low", advice=_look_at(view))
            return Finding("rank_died", (view.rank,), clause, view.where, advice=_look_at(view))
    gone = [view for view in case.views if view.gone and view.end is None]
    if gone:
        clause = f"{wording.name(gone)} {wording.verb(gone, 'is', 'are')} gone without a word"
        ranks = tuple(view.rank for view in gone)
        return Finding("rank_died", ranks, clause + signs.xid(case, gone), advice=_look_at(gone[0]))
    return None


def fell_silent(case: Case) -> Finding | None:
    """Others lost their connections, and ranks that gave nothing are the only ones that can be at the other end."""
    lost = [view for view in case.ended if signs.lost(view)]
    silent = [view for view in case.silent if view.known is None or not view.beats]
    if not lost or not silent or case.elsewhere:
        return None
    clause = f"{wording.name(silent)} fell silent: {len(lost)} others lost their connections"
    return Finding("rank_died", tuple(view.rank for view in silent), clause, sure="medium", advice=_look_at(silent[0]))


def lost_connections(case: Case) -> Finding | None:
    """Every rank is there or has reported, and all they report is lost connections."""
    lost = [view for view in case.ended if signs.lost(view)]
    if not lost or case.silent:
        return None
    clause = f"{wording.name(lost)} lost connections, and no rank had failed before: {signs.message(lost[0])}"
    nodes = tuple(dict.fromkeys(node.host for node, line in case.kernel_log if LINK.search(line)))
    advice = MEASURED
    return Finding("network", (), clause, lost[0].where, sure="medium", nodes=nodes, advice=advice)


def left(case: Case) -> Finding | None:
    """A rank ended well while others still wait for it."""
    gone = [view for view in case.ended if view.end and view.end.status in signs.ENDED_WELL]
    if not gone or not (case.waiting or any(map(signs.lost, case.ended))):
        return None
    first = gone[0]
    clause = f"{wording.name(gone)} ended with status {first.end.status if first.end else 0} and left the others behind"
    return Finding("missing_rank", tuple(view.rank for view in gone), clause, advice=_look_at(first))


def tears_down(case: Case) -> Finding | None:
    """A rank has left training and waits in the teardown: its exception is not on record yet."""
    leaving = [view for view in case.views if not view.gone and view.stack and frames.leaves(view.stack)]
    if not leaving or not case.waiting:
        return None
    clause = f"{wording.name(leaving)} left training in {wording.standing(leaving[0])} and waits in the teardown"
    advice = f"its exception is printed last: see logs/rank{leaving[0].rank}.log"
    return Finding("rank_raised", tuple(view.rank for view in leaving), clause, leaving[0].where, sure="medium",
                   advice=advice)  # fmt: skip


def tunes(case: Case) -> Finding | None:
    """Kernels are being searched: long, and not a hang."""
    return _builds(case, "autotuning", frames.AUTOTUNING)


def compiles(case: Case) -> Finding | None:
    """Kernels are being compiled: long, and not a hang."""
    return _builds(case, "compiling", frames.COMPILING)


def straggles(case: Case) -> Finding | None:
    """The run goes on, and one rank is the one that the others wait for, by its collectives or by its GPU."""
    return (_late_again(case) or _slow_device(case)) if case.advanced else None


def _late_again(case: Case) -> Finding | None:
    """The others wait for one rank, collective after collective."""
    shares = {view.rank: share for view in case.views if (share := signs.waiting_share(view)) is not None}
    if len(shares) < 2 or len(shares) < len(case.views):
        return None
    slow = min(shares, key=lambda rank: shares[rank][0])
    others = median(share for rank, (share, _) in shares.items() if rank != slow)
    once = median(longest for rank, (_, longest) in shares.items() if rank != slow)
    if others < WAITS_MUCH or shares[slow][0] > WAITS_LITTLE * others or once > ONCE:
        return None
    view = case.view(slow)
    clause = f"{wording.name([view])} is slow: the others wait for it {others:.0%} of the time{signs.clock(view)}"
    ends, advice = signs.unexcused(case), _compare(view)
    return Finding("straggler", (slow,), clause, view.where, ends=ends, sure="medium", advice=advice)


def _slow_device(case: Case) -> Finding | None:
    """One rank's GPU computes far below its clock, and all others spin."""
    slow = [view for view in case.views if signs.computes_slowly(view)]
    others = [view for view in case.views if view not in slow]
    if len(slow) != 1 or not others or not signs.spin_together(others):
        return None
    view = slow[0]
    clause = f"{wording.name([view])} is slow: its GPU computes while those of the others spin{signs.clock(view)}"
    return Finding("straggler", (view.rank,), clause, view.where, ends=False, sure="medium", advice=_compare(view))


def goes_on(case: Case) -> Finding | None:
    """Between the two rounds the run itself advanced."""
    if not case.advanced:
        return None
    moved = next((view for view in case.views if view.advanced), case.views[0])
    clause = f"not a hang: {wording.name([moved])} goes on ({wording.standing(moved)})"
    return Finding("slow_alive", (), clause, ends=False)


def moves(case: Case) -> Finding | None:
    """The rank that the others wait for is somewhere else, but it moves, reads or writes."""
    moving = [view for view in case.elsewhere if view.wandered or view.moves_bytes]
    if not moving or signs.unexcused(case):
        return None
    view = moving[0]
    thread = signs.in_files(view, signs.DATA_FILES)
    clause = f"not a hang yet: {wording.name([view])} moves{wording.inside(view)} ({wording.standing(view)})"
    return Finding("data_starved" if thread else "slow_alive", (), clause, view.where, ends=False, sure="medium")


def in_time(case: Case) -> Finding | None:
    """Nothing is past its deadline: where the ranks are is told, and nobody is at fault for it."""
    if case.alarm.limit <= 0 or case.alarm.age > case.alarm.limit or case.ended:
        return None
    now = decide(case, RULES[RULES.index(in_time) + 1 :])
    clause = f"no rank is past its deadline; at this moment {now.clause}"
    return Finding("slow_alive", (), clause, now.where, ends=False, sure="medium")


def stopped(case: Case) -> Finding | None:
    """A signal or a debugger has stopped a rank."""
    found = [view for view in case.views if view.stopped]
    if not found:
        return None
    are = wording.verb(found, "is", "are")
    clause = f"{wording.name(found)} {are} stopped by a signal or a debugger{wording.inside(found[0])}"
    advice = f"kill -CONT {found[0].beat.pid if found[0].beat else 'PID'} on {found[0].host} lets it go on"
    return Finding("missing_rank", tuple(view.rank for view in found), clause, found[0].where, advice=advice)


def stalls_in_save(case: Case) -> Finding | None:
    """A rank does not get a checkpoint written, and the others wait in the same checkpoint."""
    saving = [view for view in case.elsewhere if signs.in_save(view)]
    together = [view for view in case.waiting if view.beat and view.beat.phase == "save"]
    if not saving or len(together) < len(case.waiting):
        return None
    view = saving[0]
    do = wording.verb(saving, "does", "do")
    clause = f"{wording.name(saving)} {do} not get on with saving{wording.inside(view)}{signs.files(view)}"
    advice = "see whether the file system of the run folder answers: df, and touch a file there"
    return Finding("save_stalled", tuple(one.rank for one in saving), clause, view.where, advice=advice)


def blocked_in_io(case: Case) -> Finding | None:
    """A rank waits in the kernel for a file system."""
    found = [view for view in case.elsewhere if signs.blocked(view)]
    if not found:
        return None
    view = found[0]
    wchan = view.process.wchan if view.process else ""
    waits = wording.verb(found, "waits", "wait")
    clause = (
        f"{wording.name(found)} {waits} in the kernel ({wchan or 'state D'}){wording.inside(view)}{signs.files(view)}"
    )
    advice = f"on {view.host}: see whether that file system answers, and dmesg"
    return Finding("io_blocked", tuple(one.rank for one in found), clause, view.where, advice=advice)


def holds_lock(case: Case) -> Finding | None:
    """A thread has the interpreter lock and does not come back from C."""
    found = [view for view in case.elsewhere if view.stacks and all(frames.lock_in_c(one) for one in view.stacks)]
    found = [view for view in found if len(view.stacks) > 1]
    if not found:
        return None
    view = found[0]
    assert view.stack is not None
    thread = frames.lock_in_c(view.stack)
    assert thread is not None
    own = view.frame_of(thread)
    place = f" called in {frames.bare(own)} ({wording.short(frames.place(own))})" if own else ""
    who = "its main thread" if thread.main else f"its thread {thread.name}"
    clause = f"{wording.name(found)}: {who} holds the interpreter lock in {thread.frames[0].name}{place}"
    where = frames.place(own) if own else ""
    return Finding("gil_held", tuple(one.rank for one in found), clause, where,
                   advice="a library that waits in C must release the lock")  # fmt: skip


def starves(case: Case) -> Finding | None:
    """A rank waits for its data."""
    found = [
        (view, thread) for view in case.elsewhere if (thread := signs.in_files(view, signs.DATA_FILES)) is not None
    ]
    if not found:
        return None
    view, thread = found[0]
    own = view.frame_of(thread)
    place = f" in {frames.bare(own)} ({wording.short(frames.place(own))})" if own else ""
    starved = [one for one, _ in found]
    waits = wording.verb(starved, "waits", "wait")
    clause = f"{wording.name(starved)} {waits} for data{place}{signs.files(view)}"
    where = frames.place(own) if own else view.where
    advice = "see whether data.train and its images can be read on that node"
    return Finding("data_starved", tuple(one.rank for one, _ in found), clause, where, advice=advice)


def is_missing(case: Case) -> Finding | None:
    """A rank is somewhere else than in the collective that the others wait in."""
    if not case.elsewhere or not case.waiting:
        return None
    found = signs.furthest_behind(case)
    view = found[0]
    does = wording.verb(found, "runs", "run") if view.busy else wording.verb(found, "is", "are")
    clause = f"{wording.name(found)} {does}{wording.inside(view)} ({wording.standing(view)}{signs.behind(case, view)})"
    advice = f"on {view.host}: py-spy dump --native --pid {view.beat.pid if view.beat else 'PID'}"
    sure: Sure = "high" if len(found) == 1 else "medium"
    ranks = tuple(one.rank for one in found)
    return Finding("missing_rank", ranks, clause + signs.xid(case, found), view.where, sure=sure, advice=advice)


def unfinished(case: Case) -> Finding | None:
    """Every rank is in the same collective, and it does not finish."""
    if len(case.waiting) < len(case.views) or len(case.views) < 2:
        return None
    hints = [(node.host, line) for node, line in case.kernel_log if LINK.search(line)]
    hosts = {view.host for view in case.views}
    if not hints and len(hosts) < 2:
        return None
    nodes = tuple(dict.fromkeys(host for host, _ in hints))
    said = f"; {hints[0][0]} says: {hints[0][1].strip()}" if hints else ""
    advice = MEASURED
    between = f"the network between {counted(len(hosts), 'node')}"
    clause = f"all ranks are in the same collective and it does not finish: {between}{said}"
    return Finding("network", (), clause, sure="medium" if hints else "low", nodes=nodes, advice=advice)


def cannot_tell(case: Case) -> Finding | None:
    """None of the rules above; where ranks gave nothing, one of these may be the one that all wait for."""
    advice = "python -m slurm.diagnose RUN --archive FILE packs the evidence for a colleague"
    if case.silent:
        clause = f"cannot tell: {wording.name(case.silent)} gave nothing"
        return Finding("unknown", (), clause, sure="low", advice=f"look at node {case.silent[0].host} by hand")
    of = f"{len(case.waiting)} of {counted(len(case.views), 'rank')} waiting"
    where = of if case.waiting else "no rank waits for another"
    xid = next((f"; {node.host} says: {line.strip()}" for node, line in case.kernel_log if signs.XID.search(line)), "")
    return Finding("unknown", (), f"cannot tell: {where}, and nothing says why{xid}", sure="low", advice=advice)


RULES: tuple[Rule, ...] = (
    unequal.broken_collective,
    oom_killed,
    raised,
    died,
    left,
    fell_silent,
    lost_connections,
    tears_down,
    tunes,
    compiles,
    unequal.skips_module,
    straggles,
    goes_on,
    moves,
    in_time,
    stopped,
    unequal.diverged,
    holds_lock,
    stalls_in_save,
    blocked_in_io,
    starves,
    is_missing,
    unfinished,
    cannot_tell,
)
"""The last one always has something to say."""


def decide(case: Case, rules: Sequence[Rule] = RULES) -> Finding:
    """What the first rule says that has something to say."""
    return next(finding for rule in rules if (finding := rule(case)) is not None)


def _builds(case: Case, kind: Kind, files: re.Pattern[str]) -> Finding | None:
    for view in case.elsewhere:
        inside = view.stack is not None and frames.thread_in(view.stack, files) is not None
        compilers = view.known is not None and any(
            frames.COMPILERS.match(child.name) for seen in view.known.rounds for child in seen.children
        )
        if (inside or (compilers and kind == "compiling")) and (view.busy or view.wandered):
            clause = f"not a hang: {kind}: {wording.name([view])}{wording.inside(view)} ({wording.standing(view)})"
            return Finding(kind, (), clause, view.where, ends=False, advice="pin the kernels: prefix-train tune CONFIG")
    return None


def _compare(view: View) -> str:
    return f"compare node {view.host} with the others: python -m preflight show RUN"


def _look_at(view: View) -> str:
    return f"see logs/rank{view.rank}.log, and dmesg on {view.host}"
