"""What a job asks of Slurm, each question with a time limit: a busy or dead controller may never answer."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

ANSWER_S = 30.0
"""Slurm's own clients give up after some 10 s (MessageTimeout); one that does not is given up here."""

DEAD = ("down", "fail", "drain", "no_respond", "not_responding", "unknown", "error", "reboot", "powered_down")
"""Beginnings of node states in which a node takes no jobs."""


class NoAnswer(RuntimeError):
    """Slurm refused, did not answer in time, or is not here: what was asked, and what came."""


def ask(*argv: str, timeout_s: float = ANSWER_S) -> str:
    """Standard output of one of Slurm's programs."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except FileNotFoundError as error:
        raise NoAnswer(f"{argv[0]}: not found") from error
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"{shlex.join(argv)}: no answer in {timeout_s:g} s") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise NoAnswer(f"{shlex.join(argv)}: status {done.returncode}: {said[-300:]}")
    return done.stdout


def job_nodes() -> tuple[str, ...]:
    """Names of this job's nodes, in Slurm's order."""
    return names(os.environ["SLURM_JOB_NODELIST"])


def job_id(environment: Mapping[str, str]) -> str:
    """This job's id; an array element's in the form `array_element`.

    The plain number of one of the elements is the whole array's: a requeue by it would begin all of them again.
    """
    if array := environment.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def names(*lists: str) -> tuple[str, ...]:
    """Names of nodes that Slurm has abbreviated (`node[3,7-9]`). Asks no daemon."""
    return tuple(name for text in lists for name in ask("scontrol", "show", "hostnames", text).split())


UNKILLED = "Kill task failed"
"""Slurm's reason for a node where processes outlived their job by UnkillableStepTimeout."""


def dead_nodes(nodes: Sequence[str], since: float) -> tuple[str, ...]:
    """Those of `nodes` that fell out after `since`, seconds since 1970.

    Where Slurm says of none when that was: those that take no jobs at present, or do not respond. A node that fell out
    because the job's end did not end its processes counts only where no other did: the end came before.
    """
    lines = [[*line.split(None, 3), ""] for line in _sinfo("-n", ",".join(nodes), "-o", "%N %T %H %E")]
    dead = {name: (_time(when), reason) for name, state, when, reason, *_ in lines if not _alive(state)}
    fell = {name for name, (when, _) in dead.items() if when is not None and when >= since}
    fell = fell or {name for name, (when, _) in dead.items() if when is None}
    fell = {name for name in fell if not dead[name][1].startswith(UNKILLED)} or fell
    return tuple(node for node in nodes if node in fell)


def partition_nodes() -> set[str]:
    """Nodes of this job's partition that take jobs."""
    lines = [line.split() for line in _sinfo("-p", os.environ["SLURM_JOB_PARTITION"], "-o", "%N %T")]
    return {name for name, state in lines if _alive(state)}


def _sinfo(*arguments: str) -> list[str]:
    return ask("sinfo", "-h", "-N", *arguments).splitlines()


def _alive(state: str) -> bool:
    return not state.startswith(DEAD) and not state.endswith("*")


def _time(when: str) -> float | None:
    """Seconds since 1970 of sinfo's time of a node's reason; None where there is none (`Unknown`)."""
    try:
        return datetime.fromisoformat(when).timestamp()
    except ValueError:
        return None


def requeue(job: str, exclude: Iterable[str]) -> None:
    """Have `job` begin again, on nodes outside `exclude`. Slurm sends this very job SIGTERM at once, then SIGKILL.

    The exclusion comes second, because only a pending job can be changed: the caller has to outlive the SIGTERM.
    """
    ask("scontrol", "requeue", job)
    if names := ",".join(exclude):
        ask("scontrol", "update", f"JobId={job}", f"ExcNodeList={names}")


def outlive_requeue() -> None:
    """Ignore SIGTERM from here on, programs that this process starts included: a requeue sends it to this very job."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class JobState(NamedTuple):
    """What Slurm says of a job. source: `squeue`, or `sacct` for one that the controller has forgotten."""

    state: str
    reason: str
    source: str

    @property
    def running(self) -> bool:
        """Whether its processes should be there."""
        return self.state == "RUNNING"

    @property
    def over(self) -> bool:
        """Whether it has ended for good."""
        return self.state.split()[0] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED")


def job_states(jobs: Sequence[str], timeout_s: float = ANSWER_S) -> tuple[dict[str, JobState], list[str]]:
    """What is known of `jobs`, and one line for each program that did not answer.

    squeue knows what is not long over; sacct the rest, where there is accounting.
    """
    known: dict[str, JobState] = {}
    silences: list[str] = []
    if not jobs:
        return known, silences
    try:
        known = _queue(timeout_s)
    except NoAnswer as silence:
        silences.append(str(silence))
    rest = [job for job in jobs if job not in known]
    try:
        asked = ("-j", ",".join(rest), "-o", "JobID,State,ExitCode")
        lines = ask("sacct", "-X", "-n", "-P", *asked, timeout_s=timeout_s).splitlines() if rest else []
        for job, state, status in (line.split("|") for line in lines):
            known[job] = JobState(state, f"exit {status}", "sacct")
    except NoAnswer as silence:
        silences.append(str(silence))
    return {job: known[job] for job in jobs if job in known}, silences


def in_queue(job: str, timeout_s: float = ANSWER_S) -> JobState | None:
    """The state of `job` where it waits, runs or is ending; None where it has ended. Raises NoAnswer."""
    state = _queue(timeout_s).get(job)
    return None if state is None or state.over else state


def _queue(timeout_s: float) -> dict[str, JobState]:
    """This user's jobs that the controller has not forgotten, elements of arrays one by one."""
    lines = ask("squeue", "-h", "-r", "-t", "all", "--me", "-o", "%i|%T|%r", timeout_s=timeout_s).splitlines()
    return {job: JobState(state, reason, "squeue") for job, state, reason in (line.split("|", 2) for line in lines)}
