"""Why a job ended, from what its ranks, its watchers, the kernel and Slurm have left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from configs import runfolder
from configs.errors import UserError
from configs.schema import Config, PreflightConfig
from prefix_train import heartbeat
from prefix_train.heartbeat import End
from preflight import report
from preflight.judge import judge
from preflight.states import Finding, NodeReport, State
from slurm import causes, finish, life, memory, policy, presence, scheduler, verdict
from slurm.scheduler import NoAnswer


class NotFinite(RuntimeError):
    """Named as the trainer's."""


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


class Unwatched(RuntimeError):
    """Named as slurm.job's."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(life.VARIABLE, raising=False)
    return tmp_path


def end(run: Path, rank: int = 0, world: int = 1, **how: object) -> End:
    return heartbeat.ended(run, rank, world, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ({"error": NotFinite("update 3 is not finite: rank 1")}, "nan"),
        ({"error": OutOfMemoryError("CUDA: tried to allocate 2 GiB")}, "memory"),
        ({"error": MemoryError()}, "memory"),
        ({"error": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")}, "memory"),
        ({"error": OSError(12, "Cannot allocate memory")}, "memory"),
        ({"error": Unwatched("no watcher")}, "unwatched"),
        ({"error": RuntimeError("Connection closed by peer [10.0.0.2]:4242")}, "network"),
        ({"error": UserError("bad")}, "mistake"),
        ({"error": RuntimeError("no")}, "raised"),
        ({"status": 5}, "raised"),
        ({"signal": 15}, "killed"),
        ({"signal": 12}, "killed"),
        ({"signal": 6}, "died"),
        ({"signal": 9}, "died"),
        ({"signal": 9, "message": f"{memory.UNKNOWN}: it is dark"}, "died"),
        ({"signal": 9, "message": f"{memory.SAID}: the kernel counted it"}, "memory"),
    ],
)
def test_cause_of_a_bad_end(run: Path, how: dict[str, object], cause: policy.Cause) -> None:
    assert causes.of(end(run, **how)) == cause


def test_names_of_exceptions_are_the_trainers_own() -> None:
    """They are told by name, for reading a record imports no torch."""
    from prefix_train import blame
    from slurm import job

    assert blame.NotFinite.__name__ in causes.NOT_FINITE
    assert job.Unwatched.__name__ == causes.UNWATCHED


ADDRESSES = {f"node{number}": {f"10.0.0.{number}"} for number in (1, 2, 3)}


def lost(run: Path, host: str, to: str) -> End:
    found = end(run, error=RuntimeError(f"pair.cc:538] Connection closed by peer [{to}]:1234"))
    return replace(found, host=host)


def test_lost_connections_name_the_one_node_that_all_of_them_have(run: Path) -> None:
    one, two, three = lost(run, "node1", "10.0.0.2"), lost(run, "node3", "10.0.0.2"), lost(run, "node2", "10.0.0.3")
    ends = [one, two, three]
    assert causes.suspect(ends, ADDRESSES.__getitem__) == "node2"
    assert causes.suspect([one, lost(run, "node2", "10.0.0.1")], ADDRESSES.__getitem__) is None, "two: who knows"
    assert causes.suspect([*ends, lost(run, "node1", "10.0.0.3")], ADDRESSES.__getitem__) is None
    assert causes.suspect([lost(run, "node1", "10.0.0.9")], ADDRESSES.__getitem__) is None
    assert causes.suspect([lost(run, "node1", "10.0.0.1")], ADDRESSES.__getitem__) is None
    assert causes.suspect([], ADDRESSES.__getitem__) is None


@pytest.mark.parametrize("kind", ["network", "straggler", "oom_killed", "rank_raised", "rank_died", "missing_rank"])
def test_what_watchers_find_has_its_cause(run: Path, kind: str) -> None:
    verdict.write(run / "hangs" / "1", verdict.Verdict(0, kind, True, (), "so it is", ("node7",)), run)  # type: ignore[arg-type]
    found = finish.conclude(run, 143)
    assert found.cause == causes.OF_VERDICT.get(kind, "hang")
    assert found.cause in policy.CAUSES
    assert found[:2] == (finish.HUNG, "stuck: so it is")


def test_a_kernel_that_counts_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path("/sys/fs/cgroup/step_0/memory.events")
    monkeypatch.setattr(memory, "kernel_kills", lambda: {file: 3})
    assert memory.ended_by_kernel(1, {file: 2}, 0) == f"{memory.SAID}: the kernel counted it in {file}"
    assert memory.ended_by_kernel(1, {file: 3}, 0) is None


def test_kernels_log_is_read_where_no_cgroup_can_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = ["[ 10.5] Out of memory: Killed process 41 (python)", "[ 99.5] Memory cgroup: Killed process 42 (python)"]
    dmesg = tmp_path / "dmesg"
    dmesg.write_text("#!/bin/sh\ncat <<'E'\n" + "\n".join(lines) + "\nE\n")
    dmesg.chmod(0o755)
    monkeypatch.setattr(memory, "kernel_kills", dict)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert memory.ended_by_kernel(42, {}, 50.0) == f"{memory.SAID}: the kernel's log says: {lines[1][8:]}"
    assert memory.ended_by_kernel(41, {}, 50.0) is None, "an earlier process of that number"
    assert memory.ended_by_kernel(4, {}, 0.0) is None
    dmesg.write_text("#!/bin/sh\nexit 1\n")
    assert (memory.ended_by_kernel(42, {}, 50.0) or "").startswith(memory.UNKNOWN)


def killed(run: Path, message: str | None) -> finish.Outcome:
    end(run, signal=9, message=message)
    found = finish.conclude(run, 137)
    assert (found.cause, found.ranks) == ("died", (0,))
    return found


@pytest.mark.parametrize("message", [None, f"{memory.UNKNOWN}: it is dark"])
def test_slurm_tells_of_its_own_limits(run: Path, monkeypatch: pytest.MonkeyPatch, message: str | None) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    states = ["17|RUNNING", "17.batch|RUNNING", "17.2|FAILED"]
    monkeypatch.setattr(scheduler, "ask", lambda *_, **__: "\n".join(states))
    found = killed(run, message)
    assert finish.ask_slurm(run, found) == found, "a plain kill"
    states[2] = "17.2|OUT_OF_MEMORY"
    told = finish.ask_slurm(run, found)
    assert (told.cause, told.ranks, told.status) == ("memory", (), 137)
    assert told.line.endswith(f"SIGKILL: {memory.SAID}: Slurm says so of step 17.2")
    log = run / "logs" / "job-17.log"
    log.write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=17.2. Some of the step tasks\nmore\n")
    assert "Detected 1 oom_kill event in StepId=17.2" in finish.ask_slurm(run, found).line
    raised = found._replace(cause="raised")
    assert finish.ask_slurm(run, raised) is raised


LAUNCH = """failed: rank 1 on node1 raised E in update 3: Task launch failed on node node1: no
srun: error: slurm_receive_msgs: [[node9]:6818] failed: Zero Bytes were transmitted or received
slurmstepd: error: *** JOB 17 ON node1 CANCELLED AT 2026-11-30T08:00:00 DUE TO PREEMPTION ***
srun: error: slurm_receive_msgs: [[node3]:6818] failed: Zero Bytes were transmitted or received
srun: error: Task launch for StepId=17.9 failed on node node3: Zero Bytes were transmitted or received
srun: error: Application launch failed: Zero Bytes were transmitted or received
"""


def test_ranks_that_could_not_be_launched_are_a_cause_of_their_own(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As seen on a cluster: what stopped was called unknown, and the job did not come back."""
    life.begin(run, 0)
    life.write(run, policy.Life(0, "17", ("node1", "node2", "node3")))
    log = run / "logs" / "job-17.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text(LAUNCH)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    found = finish.conclude(run, 141, per_node=2)
    assert (found.status, found.cause) == (141, "launch")
    told = finish.ask_slurm(run, found, per_node=2)
    assert told.ranks == (4, 5)
    assert told.line.startswith("failed: no rank was started: srun ended with status 141; srun says: Task launch ")
    assert policy.decide([policy.Life(0, "17", ("node1", "node3"), "launch", 0, ("node3",))], 1, False).again
    log.unlink()
    assert finish.ask_slurm(run, found) == found
    heartbeat.Heartbeat(run, 0, 2).phase("load")
    assert finish.conclude(run, 141, per_node=2).cause == "unknown"


def answered(node: str, state: State = "pass") -> NodeReport:
    return NodeReport(node, (Finding("import.torch", state, "torch"),))


NEVER_BEGAN = [("the job", Finding("collective.join", "broken", "none of 3 ranks has answered"))]


@pytest.mark.parametrize(
    ("reports", "between", "log", "culprits"),
    [
        pytest.param(("node1", "node2", "node3"), NEVER_BEGAN, LAUNCH, ("node3",), id="ranks are not started"),
        pytest.param((), [], LAUNCH, ("node3",), id="checks are not started"),
        pytest.param(("node1", "node3"), [], "", ("node2",), id="a silent node"),
        pytest.param((), [], "", ("node1", "node2", "node3"), id="all are silent"),
        pytest.param(("node1", "node2", "node3"), NEVER_BEGAN, "", (), id="nobody says where"),
    ],
)
def test_where_preflight_cannot_be_started_srun_names_the_node(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    reports: tuple[str, ...],
    between: list[tuple[str, Finding]],
    log: str,
    culprits: tuple[str, ...],
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    life.begin(run, 0)
    life.write(run, policy.Life(0, "17", ("node1", "node2", "node3")))
    verdict_of_all = judge([answered(node) for node in reports], ("node1", "node2", "node3"), between=between)
    runfolder.write_json(run / "preflight/0/report.json", report.document(verdict_of_all))
    runfolder.write_text(run / "preflight/0/report.txt", report.text(verdict_of_all))
    runfolder.write_text(run / "logs/job-17.log", log)
    config = Config(preflight=PreflightConfig(on_bad_node="exclude"))
    ended = finish.ask_slurm(run, finish.act_failed(run, "gate", 1), config.slurm.tasks_per_node)
    told, again = finish.decide(run, config, ended)
    assert life.read(run)[-1].culprits == culprits
    assert ("Task launch for StepId=17.9 failed on node node3" in told.line) == bool(log)
    assert (again is not None) == (len(culprits) == 1)
    assert life.read(run)[-1].excluded == (culprits if again else ())


def test_where_nobody_can_tell_of_memory_that_is_said(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise NoAnswer("sacct: not found")

    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr(scheduler, "ask", refuse)
    dark = killed(run, f"{memory.UNKNOWN}: it is dark")
    assert finish.ask_slurm(run, dark).line.endswith(f"SIGKILL: {memory.UNKNOWN}: sacct: not found")
    assert finish.ask_slurm(run, dark).cause == "died"
    plain = killed(run, None)
    assert finish.ask_slurm(run, plain) == plain, "the kernel has said that it was not memory"


def test_run_folder_that_is_gone_or_cannot_be_written_is_told(run: Path) -> None:
    gone = run / "gone"
    assert finish.conclude(gone, 0)[:3] == (1, f"failed: the run folder {gone} is gone", "setup")
    refusing = Path("/proc/self")  # also for root
    found = finish.conclude(refusing, 1)
    assert found.line.startswith(f"failed: the run folder {refusing} cannot be written: ")
    assert (found.status, found.cause) == (1, "setup")
    with pytest.raises(UserError, match="the run folder /proc/self cannot be written: "):
        life.begin(refusing, 0)
    assert finish.conclude(run, 0).line == "failed: rank 0 left no word of how it ended"
    assert not list(run.iterdir()), "nothing is left of the trial"


def test_watcher_is_there_only_in_its_own_life(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not presence.wait(run, 0, 0.0)
    presence.say(run, 0)
    assert presence.wait(run, 0, 0.0)
    assert not presence.wait(run, 1, 0.0)
    (run / runfolder.ATTEMPT).write_text("1")
    with pytest.raises(runfolder.StaleAttempt):
        presence.say(run, 0)
    monkeypatch.setenv(life.VARIABLE, "1")
    assert not presence.wait(run, 0, 0.0)


def test_watcher_that_ended_before_a_slow_rank_was_gone_has_not_died(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As seen on a busy machine: a rank that has written its end took ten seconds more to exit."""
    presence.say(run, 0)
    presence.leave(run, 0)
    monkeypatch.setattr(presence, "runs", lambda *_: False)
    assert not presence.check(run, 0)
    assert not presence.lost(run, 0)


def test_watcher_that_died_is_written_down_once_and_told(run: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE)
    presence.say(run, 0)
    path = run / "heartbeat" / "watch0.json"
    runfolder.write_json(path, {**runfolder.read_json(path), "pid": watcher.pid, "time": time.time()})
    assert not presence.check(run, 0)
    watcher.kill()
    watcher.wait()
    assert presence.check(run, 0)
    assert not presence.check(run, 0)
    end(run, status=runfolder.STOPPED)
    line = finish.conclude(run, 0).line
    assert "with a checkpoint; the watcher of " in line
    assert line.endswith(f"; to go on: python -m slurm.submit {run}")


@pytest.mark.parametrize(
    ("said", "culprits"),
    [
        (("drained {before}", "down* {since}", "allocated* Unknown", "drained Unknown", "idle Unknown"), ("node2",)),
        (("drained {before}", "allocated* Unknown", "down a while ago", "idle Unknown"), ("node2", "node3")),
        (("drained {before}", "idle Unknown"), ()),
        (("down* {since} Not responding", "draining {since} Kill task failed"), ("node1",)),
        (("allocated Unknown none", "draining {since} Kill task failed"), ("node2",)),
    ],
    ids=["since", "nobody knows when", "before", "its end did not end its processes", "only that"],
)
def test_a_life_that_could_not_say_how_it_ended_blames_nodes_that_fell_out_in_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, said: tuple[str, ...], culprits: tuple[str, ...]
) -> None:
    options = ("model: {build: {x: 1}}", "data: {train: t.jsonl}", "pack: {packs_per_update: 2}", "train: {updates: 9}")
    runfolder.write_text(run / runfolder.CONFIG, "\n".join(options))
    nodes = tuple(f"node{number}" for number in range(1, len(said) + 1))
    shifts = {"before": -3600, "since": 30}

    def answer(*argv: str) -> str:
        assert argv[-1] == "%N %T %H %E"
        now = {name: time.strftime("%FT%T", time.localtime(time.time() + by)) for name, by in shifts.items()}
        return "".join(f"{node} {line.format(**now)}\n" for node, line in zip(nodes, said, strict=True))

    monkeypatch.setattr(scheduler, "ask", answer)
    monkeypatch.setattr(scheduler, "job_nodes", lambda: ("node9",))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    life.begin(run, 0)
    life.write(run, policy.Life(0, "17", nodes))
    assert life.begin_job(run) == 1
    first = life.read(run)[0]
    assert (first.cause, first.culprits) == ("node" if culprits else "killed", culprits)
