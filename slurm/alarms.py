"""How the watchers of a job take evidence together: one raises an alarm in hangs/<n>, all answer, one judges.

Nobody talks to anybody but through the run folder. The folder's number belongs to whoever makes it, so two watchers
that notice at the same moment raise one alarm. A watcher that is gone keeps nobody: others judge in its place.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from configs import runfolder
from configs.errors import UserError
from prefix_train import heartbeat
from slurm import evidence, verdict
from slurm.evidence import Alarm, Node, Rank, Seen
from slurm.verdict import Verdict

WAIT_S = 28.0
"""How long after it began to look the judging watcher waits for the evidence of all nodes; looking takes 26 s at most
by default. With a poll before and one behind, the verdict is there half a minute after the alarm."""
SHORT_WAIT_S = 5.0
"""How long after its own evidence where the ranks are ended in any case, because the job has little time left."""
MOMENT_S = 2.0
"""How long after its own evidence at least."""
TURN_S = 3.0
"""After how much longer each further node's watcher judges in its place."""
BEING_RAISED_S = 10.0
"""A folder without an alarm is one that is just being written, unless it is older than this."""
LOOK_S = 0.2
"""How often somebody who asked looks for the answer."""
ANSWER_S = 90.0


def raise_one(run: Path, alarm: Alarm, inside: bool = True) -> Path | None:
    """Open hangs/<n> with `alarm`; None where somebody else is just raising one. inside: whether a watcher asks."""
    present = verdict.folders(run)
    if present and _is_open(present[-1], alarm.attempt):
        return None
    folder = run / runfolder.HANGS / str(int(present[-1].name) + 1 if present else 1)
    folder.parent.mkdir(exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        return None
    evidence.write_alarm(folder, alarm, run if inside else None)
    return folder


def is_stale(folder: Path) -> bool:
    """Whether whoever made this folder for an alarm will not write one any more."""
    return time.time() - folder.stat().st_mtime > BEING_RAISED_S


def _is_open(folder: Path, attempt: int) -> bool:
    if verdict.load(folder) is not None:
        return False
    alarm = evidence.read_alarm(folder)
    if alarm is None:
        return not is_stale(folder)
    forgotten = alarm.only_look and time.time() - alarm.time > ANSWER_S and not evidence.answered(folder)
    return alarm.attempt == attempt and not forgotten


def waiting_since(alarm: Alarm, began: float, ended: float) -> float:
    """From when on the others' evidence is waited for by a watcher that looked from `began` to `ended` (monotonic).

    All nodes look at the same time, so what that takes counts.
    """
    return ended if alarm.must_end else max(began, ended - WAIT_S + MOMENT_S)


def is_my_turn(alarm: Alarm, node: int, complete: bool, waited_s: float) -> bool:
    """Whether the watcher of node `node` judges now: as soon as all evidence is there, or has been waited for.

    The one that noticed judges, after a person's question the first; the others if it does not.
    """
    wait_s = SHORT_WAIT_S if alarm.must_end else WAIT_S
    if node == max(alarm.node, 0):
        return complete or waited_s > wait_s
    return waited_s > wait_s + TURN_S * (1 + node)


def conclude(run: Path, folder: Path, alarm: Alarm, world: int, hosts: tuple[str, ...]) -> Verdict:
    """What the evidence in `folder` says, with how those ranks ended that no watcher looks after any more."""
    nodes = evidence.read(folder)
    found = verdict.judge([*nodes, *_ended(run, alarm.attempt, nodes)], alarm, world, hosts)
    if alarm.only_look:
        return replace(found, ends=False)
    if alarm.must_end:
        return replace(found, ends=True, sentence=f"{alarm.sentence}: {found.sentence}")
    return found


def _ended(run: Path, attempt: int, nodes: tuple[Node, ...]) -> list[Node]:
    """One node for each rank that has ended and gave no evidence: its last words are in the run folder."""
    known = {rank.rank for node in nodes for rank in node.ranks}
    beats = {beat.rank: beat for beat in heartbeat.read(run) if beat.attempt == attempt}
    found = []
    for end in heartbeat.read_ends(run):
        if end.attempt == attempt and end.rank not in known:
            seen = Seen(beats.get(end.rank), None, None, ())
            ranks = (Rank(end.rank, (seen, seen), (), end, ()),)
            found.append(Node(end.host, -1, attempt, end.time, 0.0, 0.0, ranks, ((), ()), (), (), (), "", ()))
    return found


def look_now(run: Path, answer_s: float = ANSWER_S) -> Path:
    """Have the watchers of a live job take evidence and judge it; nothing is ended. The folder with the verdict.

    Raises UserError where no watcher answers: the job does not run. No question is left behind that nobody answers or
    waits for.
    """
    attempt = runfolder.current_attempt(run)
    asked = Alarm(attempt, "", -1, 0.0, 0.0, "somebody asked how the job stands", time.time())
    end = time.monotonic() + answer_s
    while (folder := raise_one(run, asked, inside=False)) is None:
        if time.monotonic() > end:
            raise UserError(f"{run}: evidence is being taken already; look into its hangs/ in a minute")
        time.sleep(LOOK_S)
    try:
        while verdict.load(folder) is None:
            if time.monotonic() > end:
                return _unanswered(run, folder, asked)
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        if not evidence.answered(folder):
            shutil.rmtree(folder)
        raise
    return folder


def _unanswered(run: Path, folder: Path, alarm: Alarm) -> Path:
    """Judge what there is; without any evidence leave no trace."""
    nodes: tuple[Node, ...] = evidence.read(folder)
    if not nodes:
        shutil.rmtree(folder)
        raise UserError(f"{run}: no watcher of this run answered: the job does not run")
    print("not all watchers have answered", file=sys.stderr)
    beats = [seen.beat for node in nodes for rank in node.ranks for seen in rank.rounds if seen.beat]
    world = max((beat.world for beat in beats), default=sum(len(node.ranks) for node in nodes))
    found = conclude(run, folder, alarm, world, tuple(node.host for node in nodes))
    runfolder.write_text(folder / verdict.TEXT, found.text())
    runfolder.write_json(folder / verdict.JSON, asdict(found))
    return folder
