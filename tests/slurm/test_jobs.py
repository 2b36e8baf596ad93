"""Real jobs on a real cluster. The trainer is a stand-in without torch; everything around it is the product."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from configs import runfolder
from slurm import diagnose, standing, status
from tests.slurm import jobs
from tests.slurm.lab import Lab, LabError, wait_for
from tests.standins import make_clone, seen, submit_command

SAY_AND_GO = """
import os, pathlib
from slurm import presence

presence.say(pathlib.Path(os.environ["PREFIX_TRAIN_RUN"]), int(os.environ["SLURM_NODEID"]))
"""
"""A watcher that is there, and then is not."""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clone(tmp_path_factory.mktemp("source") / "clone")


@contextmanager
def memory_limit(most: int) -> Iterator[Path]:
    """A cgroup whose processes may use `most` more bytes together."""
    first = Path("/sys/fs/cgroup/memory")
    root, option = (first, "memory.limit_in_bytes") if first.is_dir() else (first.parent, "memory.max")
    cgroup = root / f"prefix-train-test-{os.getpid()}"
    try:
        cgroup.mkdir()
        (cgroup / option).write_text(str(most))
    except OSError as error:
        pytest.skip(f"no cgroup with a memory limit can be made here: {error}")
    try:
        yield cgroup
    finally:
        wait_for(lambda: not (cgroup / "cgroup.procs").read_text(), "the end of all in the cgroup")
        cgroup.rmdir()


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", 0) as stream:
        while True:
            stream.write(bytes(65536))


def test_job_of_two_nodes_runs_to_its_end_in_a_folder_with_a_hostile_name(
    lab: Lab, clone: Path, tmp_path: Path
) -> None:
    root = tmp_path / 'it\'s "my" $(runs) größe'
    job = jobs.start(lab, clone, f"run_root={root}", "name='a\nb; rm -rf \"x'", 'slurm.comment=it\'s "$HOME"', ranks=2)
    job.end("COMPLETED")
    assert job.last_line.startswith("complete")
    assert job.status == 0
    places = [seen(job.run, rank)["environment"] for rank in range(4)]
    assert [place["SLURMD_NODENAME"] for place in places] == ["node1", "node1", "node2", "node2"]
    assert {place["MASTER_ADDR"] for place in places} == {"node1"}
    assert len({place["MASTER_PORT"] for place in places}) == 1
    assert seen(job.run, 3)["train"] == str(job.run / "code" / "prefix_train" / "train.py")
    assert [(life.nodes, life.cause) for life in job.lives] == [(("node1", "node2"), "complete")]


def test_exception_in_the_trainer_is_told_and_nothing_follows(lab: Lab, clone: Path) -> None:
    job = jobs.start(lab, clone, "model.build.do=raise")
    job.end("FAILED")
    assert job.status == 1
    assert re.fullmatch(
        r"failed: rank 1 on node2 raised RuntimeError in update 2 at \S+/train.py:\d+: no way", job.last_line
    )
    assert [(life.cause, life.update, life.excluded) for life in job.lives] == [("raised", 2, ())]
    assert lab.job(job.id)["Restarts"] == "0"


def test_r43_a_rank_that_raises_ends_the_job_with_its_own_status(lab: Lab, clone: Path) -> None:
    """srun itself says 143 or 1; nothing follows, for the trainer would raise again."""
    job = jobs.start(lab, clone, "model.build.do=five")
    job.end("FAILED")
    assert job.status == 5
    assert job.last_line == "failed: rank 1 on node2 ended with status 5 in update 3"
    assert [life.cause for life in job.lives] == ["raised"]


def test_two_submissions_at_once_and_one_from_within_a_job(lab: Lab, clone: Path, tmp_path: Path) -> None:
    """The job that submits has its own memory, tasks and nodes in its environment: none of it reaches the other."""
    place = {name: lab.environment[name] for name in ("PATH", "SLURM_CONF")}
    command, env = submit_command(clone, "cluster=slurm", *jobs.QUICK, f"run_root={tmp_path}", "--json", **place)
    outside = [subprocess.Popen(command, cwd=clone, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    script = tmp_path / "outer.sh"
    script.write_text(f"#!/bin/sh\ncd {shlex.quote(str(clone))} && exec {shlex.join(command)}\n")
    outer = lab.sbatch("--mem=500M", "-N1", "-n3", "--cpus-per-task=2", "-o", tmp_path / "outer.log", script)
    assert lab.wait_end(outer) == "COMPLETED"
    printed = [process.communicate(timeout=60)[0] for process in outside] + [(tmp_path / "outer.log").read_text()]
    documents = [json.loads(text.splitlines()[-1]) for text in printed]
    found = [jobs.Job(lab, document["job"], Path(document["run"])) for document in documents]
    assert len({job.run for job in found}) == 3
    for job in found:
        job.end("COMPLETED")
        assert job.last_line.startswith("complete")


@pytest.mark.slow
def test_a_mistake_within_a_rank_is_the_jobs_last_line_and_what_status_and_diagnose_say(lab: Lab, clone: Path) -> None:
    job = jobs.start(lab, clone, "model.build.do=mistake")
    job.end("FAILED")
    line = "error: data.train: row 3 is bad"
    assert (job.status, job.last_line) == (2, line)
    assert [life.cause for life in job.lives] == ["mistake"]
    assert runfolder.read_json(job.run / runfolder.END)["line"] == line
    assert line in status.page(standing.look(job.run, None, time.time()))
    assert diagnose.diagnose(job.run).text().startswith(f"{line}. Confidence high")


def test_r42_gate_ends_the_job_before_training(lab: Lab, clone: Path) -> None:
    job = jobs.start(lab, clone, STANDIN_JUDGE_STATUS="1")
    job.end("FAILED")
    assert job.status == 78
    assert not (job.run / "seen").exists()
    assert job.last_line in status.page(standing.look(job.run, None, time.time()))
    assert job.last_line in diagnose.diagnose(job.run).text()


@pytest.mark.slow
def test_r42_fails_without_fix(lab: Lab, clone: Path) -> None:
    """A line of submitit's setup that fails does not end the job by itself."""
    job = jobs.start(lab, clone, "slurm.setup=['exit() { :; }']", STANDIN_JUDGE_STATUS="1")
    lab.wait_end(job.id)
    assert (job.run / "seen").exists()


@pytest.mark.slow
def test_r43_fails_without_fix(lab: Lab, clone: Path) -> None:
    """Whatever runs after the training gives the job its status, unless that is kept."""
    job = jobs.start(lab, clone, "slurm.setup=['exit() { :; }']", "model.build.do=five")
    job.end("COMPLETED")


@pytest.mark.slow
def test_r47_training_without_a_result_is_no_success(lab: Lab, clone: Path) -> None:
    job = jobs.start(lab, clone, "model.build.do=forget")
    job.end("FAILED")
    assert job.status == 1
    assert job.last_line == "failed: all ranks ended well, but there is no result.json"


@pytest.mark.slow
def test_r47_fails_without_fix(lab: Lab, clone: Path) -> None:
    """srun's own status is a success."""
    job = jobs.start(lab, clone, "slurm.setup=['exit() { builtin exit $rc; }']", "model.build.do=forget")
    job.end("COMPLETED")


@pytest.mark.slow
def test_killed_rank_leaves_its_node_out_and_the_same_failure_again_ends_the_job(lab: Lab, clone: Path) -> None:
    job = jobs.start(lab, clone, "model.build.do=kill")
    job.end("FAILED")
    assert job.status == 137
    assert "rank 1 on node2 was ended by SIGKILL in update 2; begins again without node2" in job.log
    assert job.last_line.endswith(
        f"not again: the same failure twice at update 2; to go on: python -m slurm.submit {job.run}"
    )
    first, second = job.lives
    assert (first.cause, first.update, first.culprits, first.excluded) == ("died", 2, ("node2",), ("node2",))
    assert "node2" not in second.nodes
    assert (second.cause, second.update) == ("died", 2)


@pytest.mark.slow
def test_r44_hung_ranks_are_ended_from_outside_and_the_job_begins_again(lab: Lab, clone: Path) -> None:
    """All ranks wait in C at update 2, where no Python signal handler runs."""
    job = jobs.start(lab, clone, "model.build.do=wait", *jobs.SHARP)
    job.end("FAILED")
    assert job.status == 79
    assert [(life.cause, life.update) for life in job.lives] == [("hang", 2), ("hang", 2)]
    assert "not again: the same failure twice at update 2" in job.last_line


@pytest.mark.slow
def test_r44_fails_without_fix(lab: Lab, clone: Path, tmp_path: Path) -> None:
    """Where nobody watches nothing ends the job: neither the warning before its time is up nor a deadline."""
    (tmp_path / "watch.py").write_text(SAY_AND_GO)
    idle = f'command srun -N2 -n2 --overlap --mem=0 "$PREFIX_TRAIN_PYTHON" {tmp_path}/watch.py'
    no_watcher = (
        f'srun() {{ case $* in *slurm.watch*) {idle};; *) command srun "$@";; esac; }}; export PREFIX_TRAIN_RUN'
    )
    job = jobs.start(lab, clone, "model.build.do=wait", *jobs.SHARP, f"slurm.setup=['{no_watcher}']")
    job.wait_update(2)
    lab.run("scancel", "--signal=USR2", job.id)
    with pytest.raises(LabError):
        lab.wait_end(job.id, seconds=20)
    assert lab.state(job.id) == "RUNNING"


@pytest.mark.slow
def test_node_without_a_watcher_starts_no_rank_and_is_left_out(lab: Lab, clone: Path) -> None:
    """In the first life the watchers' step reaches one node only."""
    one_node = 'srun() { case $SLURM_RESTART_COUNT:$* in [!1-9]*slurm.watch*) shift 2; command srun -N1 -n1 "$@";; '
    one_node += '*) command srun "$@";; esac; }'
    job = jobs.start(lab, clone, "watch.start_s=8", "model.build.do=slow", f"slurm.setup=['{one_node}']")
    job.end("COMPLETED")
    assert "failed: rank 1 on node2 was not started: no watcher within watch.start_s=8 s" in job.log
    first, second = job.lives
    assert (first.cause, first.culprits, first.excluded) == ("unwatched", ("node2",), ("node2",))
    assert (second.cause, "node2" in second.nodes) == ("complete", False)


@pytest.mark.slow
def test_job_whose_watchers_never_start_ends(lab: Lab, clone: Path) -> None:
    no_watcher = 'srun() { case $* in *slurm.watch*) return 1;; esac; command srun "$@"; }'
    job = jobs.start(lab, clone, "watch.start_s=3", f"slurm.setup=['{no_watcher}']")
    job.end("FAILED")
    assert [life.cause for life in job.lives] == ["unwatched", "unwatched"]
    assert "not again: the same failure twice at update 0" in job.last_line
    assert not (job.run / "seen").exists()


@pytest.mark.slow
def test_watcher_that_dies_takes_nothing_with_it_and_is_told(lab: Lab, clone: Path) -> None:
    job = jobs.start(lab, clone, "model.build.do=slow", "train.updates=25")
    job.wait_update(2)
    lab.inside("kill", "-9", job.watcher(1), node="node2")
    job.end("COMPLETED")
    assert [life.cause for life in job.lives] == ["complete"]
    assert "; the watcher of node2 had died: from " in job.last_line
    assert "the watcher of this node has died: training goes on" in (job.run / "logs" / "rank1.log").read_text()


@pytest.mark.slow
def test_rank_that_the_kernel_kills_for_lack_of_memory_is_no_fault_of_its_node(lab: Lab, clone: Path) -> None:
    job = jobs.start(lab, clone, "model.build.do=gorge", "train.updates=60")
    with memory_limit(64 << 20) as cgroup:
        job.wait_update(2)
        rank = job.pid(1)
        for pid in (lab.parent("node2", rank), rank):
            lab.inside("sh", "-c", f"echo {pid} > {cgroup}/cgroup.procs", node="node2")
        job.end("FAILED")
    assert job.status == 137
    told = rf"failed: rank 1 on node2 was ended by SIGKILL in update \d+: out of memory: .* {cgroup}/.*"
    assert re.fullmatch(told, job.last_line)
    assert [(life.cause, life.excluded) for life in job.lives] == [("memory", ())]


@pytest.mark.slow
def test_cancelled_job_ends_and_does_not_come_back(lab: Lab, clone: Path) -> None:
    job = jobs.start(lab, clone, "model.build.do=slow", "train.updates=60")
    job.wait_update(2)
    lab.run("scancel", job.id)
    job.end("CANCELLED")
    assert lab.job(job.id)["Restarts"] == "0"
    for node in ("node1", "node2"):
        assert lab.processes(node, str(job.run)) == []


@pytest.mark.slow
def test_warned_job_saves_and_begins_again_at_once(lab: Lab, clone: Path) -> None:
    """As before the time limit: Slurm sends USR2 to every task, watchers included."""
    job = jobs.start(lab, clone, "model.build.do=slow", "train.updates=12")
    job.wait_update(2)
    lab.run("scancel", "--signal=USR2", job.id)
    job.wait_life(1)
    job.end("COMPLETED")
    assert "stopped as asked, with a checkpoint; begins again from update" in job.log
    assert [life.cause for life in job.lives] == ["stopped", "complete"]
    assert lab.job(job.id)["Restarts"] == "1"


@pytest.mark.slow
def test_scontrol_that_never_answers_leaves_the_job_with_its_status_and_a_way_to_go_on(
    lab: Lab, clone: Path, tmp_path: Path
) -> None:
    deaf = tmp_path / "scontrol"
    deaf.write_text('#!/bin/sh\ncase $1 in show) exec /usr/bin/scontrol "$@";; *) sleep 600;; esac\n')
    deaf.chmod(0o755)
    path = f"slurm.setup=['export PATH={tmp_path}:$PATH']"
    job = jobs.start(lab, clone, "model.build.do=slow", "train.updates=60", path)
    job.wait_update(2)
    lab.run("scancel", "--signal=USR2", job.id)
    job.end("FAILED")
    assert job.status == runfolder.STOPPED
    assert "could not begin again: scontrol requeue" in job.last_line
    assert job.last_line.endswith(f"to go on: python -m slurm.submit {job.run}")


@pytest.mark.slow
def test_preempted_job_saves_within_its_grace_and_begins_again(lab: Lab, clone: Path, tmp_path: Path) -> None:
    job = jobs.start(lab, clone, "model.build.do=slow", "train.updates=25", "slurm.partition=low", nodes=4)
    job.wait_update(2)
    lab.run("sbatch", "-p", "main", "-N4", "--exclusive", "-o", tmp_path / "other.log", "--wrap", "sleep 3")
    job.wait_life(1)
    job.end("COMPLETED")
    assert [life.cause for life in job.lives] == ["stopped", "complete"]


@pytest.mark.slow
def test_preempted_job_without_grace_begins_again_and_blames_nobody(lab: Lab, clone: Path, tmp_path: Path) -> None:
    """Slurm requeues it by itself, and no line of the script is left to say anything. Not one failure is allowed."""
    lab.run("scontrol", "update", "PartitionName=low", "GraceTime=0")
    try:
        options = ("model.build.do=slow", "train.updates=25", "slurm.partition=low", "slurm.max_requeues=0")
        job = jobs.start(lab, clone, *options, nodes=4)
        job.wait_update(2)
        lab.run("sbatch", "-p", "main", "-N4", "--exclusive", "-o", tmp_path / "other.log", "--wrap", "sleep 3")
        job.wait_life(1)
        job.end("COMPLETED")
    finally:
        lab.run("scontrol", "update", "PartitionName=low", "GraceTime=30")
    first, second = job.lives
    assert (first.cause, first.culprits, first.excluded) == ("killed", (), ())
    assert first.update >= 2
    assert (second.cause, second.nodes) == ("complete", first.nodes)


@pytest.mark.slow
@pytest.mark.parametrize("node", ["node1", "node2"])
def test_node_that_dies_is_left_out(lab: Lab, clone: Path, node: str) -> None:
    """With the first node goes the batch script: the next life finds out, and goes elsewhere."""
    job = jobs.start(lab, clone, "model.build.do=slow", "train.updates=40", ranks=2)
    job.wait_update(3)
    lab.node_kill(node)
    job.wait_life(1)
    job.end("COMPLETED")
    first, second = job.lives
    assert (first.cause, first.culprits, first.excluded) == ("node", (node,), (node,))
    assert first.update >= 3
    assert node not in second.nodes


@pytest.mark.slow
def test_ranks_that_outlive_their_slurmd_may_not_touch_the_next_life(lab: Lab, clone: Path) -> None:
    job = jobs.start(lab, clone, "model.build.do=slow", "train.updates=60")
    job.wait_update(3)
    lab.slurmd_kill("node2")
    wait_for(lambda: lab.state(job.id) == "PENDING", "the job's requeue")
    assert lab.processes("node2", "slurm.rank")
    job.wait_life(1)
    job.end("COMPLETED")
    assert "StaleAttempt: attempt 0 may not write into" in (job.run / "logs" / "rank1.log").read_text()
    assert lab.processes("node2", "slurm.rank") == []
    assert "node2" not in job.lives[1].nodes
    assert seen(job.run, 1)["environment"]["SLURMD_NODENAME"] != "node2"
    ends = [json.loads((job.run / "logs" / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert {(end["attempt"], end["status"]) for end in ends} == {(1, 0)}


@pytest.mark.slow
def test_full_disk_ends_the_job(lab: Lab, clone: Path) -> None:
    """The run folder is on a small disk that only the lab has, so what submits runs within the lab."""
    small = lab.root / "small"
    job = jobs.start(lab, clone, "model.build.do=slow", "train.updates=60", f"run_root={small}/runs", within=True)
    job.wait_update(3)
    with pytest.raises(OSError, match="No space left"):
        fill(lab.within(small) / "filler")
    job.end("FAILED")
    assert job.status != 0
    assert lab.job(job.id)["Restarts"] == "0"


@pytest.mark.slow
def test_run_folder_that_is_removed_ends_the_job(lab: Lab, clone: Path, tmp_path: Path) -> None:
    job = jobs.start(lab, clone, "model.build.do=slow", "train.updates=60", f"run_root={tmp_path}")
    job.wait_update(3)
    job.run.rename(tmp_path / "elsewhere")
    assert lab.wait_end(job.id) == "FAILED"
    log = (tmp_path / "elsewhere" / "logs" / f"job-{job.id}.log").read_text()
    assert f"failed: the run folder {job.run} is gone" in log.splitlines()
    assert not job.run.exists(), "nothing is to bring it back"
    assert lab.job(job.id)["Restarts"] == "0"


@pytest.mark.slow
def test_elements_of_an_array_live_and_end_by_themselves(lab: Lab, clone: Path) -> None:
    quick, stopped = jobs.start_sweep(lab, clone, "model.build.do=train,slow", "train.updates=14")
    stopped.wait_update(2)
    lab.run("scancel", "--signal=USR2", stopped.id)
    quick.end("COMPLETED")
    stopped.end("COMPLETED")
    assert [life.cause for life in stopped.lives] == ["stopped", "complete"]
    assert [life.cause for life in quick.lives] == ["complete"]
    assert stopped.run.parent == quick.run.parent
    assert seen(stopped.run, 0)["environment"]["SLURM_ARRAY_TASK_ID"] == "1"


@pytest.mark.slow
def test_node_whose_network_falls_silent_is_left_out(lab: Lab, clone: Path) -> None:
    job = jobs.start(lab, clone, "model.build.do=slow", "train.updates=40", *jobs.SHARP)
    job.wait_update(3)
    lab.node_cut("node2")
    job.wait_life(1)
    lab.node_kill("node2")
    job.end("COMPLETED")
    assert job.lives[0].excluded == ("node2",)
    assert "node2" not in job.lives[1].nodes


@pytest.mark.slow
def test_stopped_rank_is_named_and_its_node_left_out(lab: Lab, clone: Path) -> None:
    job = jobs.start(lab, clone, "model.build.do=slow", "train.updates=25", *jobs.SHARP)
    job.wait_update(5)
    lab.inside("kill", "-STOP", job.pid(1), node="node2")
    job.end("COMPLETED")
    first, second = job.lives
    assert (first.cause, first.culprits, first.excluded) == ("hang", ("node2",), ("node2",))
    assert "stuck: rank 1 on node2 is stopped" in job.log
    assert (second.cause, "node2" in second.nodes) == ("complete", False)
