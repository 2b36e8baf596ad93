"""What a job consists of: its acts, the frozen code, and its ranks."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from configs import runfolder
from configs.errors import UserError
from configs.nodefolder import private_folder
from prefix_train import heartbeat
from slurm import acts, freeze, job, life, rank, sbatch
from tests.standins import make_clone
from tests.submissions import composed

# Acts


def test_acts_in_order(tmp_path: Path) -> None:
    config = composed(tmp_path, f"data.train={tmp_path}/new/train.jsonl", "data.prepare=digits")
    found = acts.before_training(config, Path("/r"))
    assert [act.name for act in found] == ["data", "plan", "preflight", "gate", "collectives", "gate"]
    assert found[0].argv[1:] == ("-m", "prefix_train.cli", "data", "digits", str(tmp_path / "new"))
    assert [act.decides for act in found] == [True, True, False, True, False, True]
    assert [act.where for act in found] == ["once", "once", "node", "once", "rank", "once"]
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "train.jsonl").write_text("")
    assert [act.name for act in acts.before_training(config, Path("/r"))][:3] == ["plan", "preflight", "gate"]


def test_ranks_meet_between_two_judgements_and_only_where_there_are_several(tmp_path: Path) -> None:
    """On Slurm each rank is a task of the step; on one machine the act starts them."""
    two = ("slurm.nodes=1", "slurm.tasks_per_node=2", "slurm.gpus_per_node=0")
    for cluster, words in (("slurm", ()), ("local", ("--spawn", "2"))):
        found = acts.before_training(composed(tmp_path, *two, f"cluster={cluster}"), Path("/r"))[-3:]
        assert [act.argv[2:] for act in found] == [
            ("preflight", "judge", "/r", "--quiet"),
            ("preflight", "collectives", "/r", *words),
            ("preflight", "judge", "/r", "--ranks", "2"),
        ]
    for alone in (("cluster=debug",), ("preflight.collectives=false",), ("slurm.tasks_per_node=1",)):
        found = acts.before_training(composed(tmp_path, *two, *alone), Path("/r"))
        assert [(act.name, act.argv[3:]) for act in found[-2:]] == [
            ("preflight", ("run", "/r")),
            ("gate", ("judge", "/r")),
        ]


def test_a_step_may_take_as_long_as_its_checks(tmp_path: Path) -> None:
    options = ("preflight.deadline_s=10", "preflight.prove_deadline_s=100", "preflight.start_s=5")
    limits = ("preflight.collective_deadline_s=20", "preflight.prove_pins=true")
    for gpus, seconds in ((8, ["115", "25"]), (0, ["15", "25"])):
        text = sbatch.script(composed(tmp_path, *options, *limits, f"slurm.gpus_per_node={gpus}"), Path("/runs/x"))
        assert re.findall(r"^timeout --kill-after=10 (\d+) srun", text, re.MULTILINE) == seconds


@pytest.mark.parametrize("given", ["cyclic", "plane=4", "arbitrary"])
def test_ranks_that_are_not_dealt_node_by_node_are_refused(tmp_path: Path, given: str) -> None:
    with pytest.raises(UserError, match=r"slurm.extra.distribution=.*: begin with block"):
        composed(tmp_path, f"slurm.extra.distribution={given}")
    assert composed(tmp_path, "slurm.extra.distribution=block:block").slurm.extra["distribution"] == "block:block"


# Frozen code


def test_freeze_records_commit_and_difference(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    first = freeze.freeze(tmp_path / "run0", clone)
    assert (first["commit"], first["dirty"]) == (None, None)
    git = ["git", "-C", str(clone), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "m"]):
        subprocess.run([*git, *command], check=True)
    clean = freeze.freeze(tmp_path / "run1", clone)
    assert re.fullmatch("[0-9a-f]{40}", clean["commit"])
    assert (clean["dirty"], clean["diff"], clean["files"]) == (False, None, first["files"])
    with (clone / "slurm" / "job.py").open("a") as stream:
        stream.write("# changed\n")
    dirty = freeze.freeze(tmp_path / "run2", clone)
    assert dirty["dirty"]
    assert re.fullmatch("[0-9a-f]{64}", dirty["diff"])
    assert dirty["files"] != clean["files"]
    assert dirty["commit"] == clean["commit"]
    assert runfolder.read_json(tmp_path / "run2" / "code" / "COMMIT.json") == dirty
    assert freeze.tree_hash(tmp_path / "run1" / "code") == clean["files"]


def test_freeze_in_a_folder_of_another_repository_claims_no_commit(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "m"], check=True)
    assert freeze.freeze(tmp_path / "run", make_clone(tmp_path / "site"))["commit"] is None


def test_frozen_code_comes_first_and_the_working_folder_never(tmp_path: Path) -> None:
    found = freeze.environment(tmp_path, {"PYTHONPATH": "/mine", "A": "b"})
    assert found == {"PYTHONPATH": f"{tmp_path}/code:/mine", "PYTHONSAFEPATH": "1", "A": "b"}
    assert freeze.environment(tmp_path, {})["PYTHONPATH"] == f"{tmp_path}/code"


# Ranks


def test_rank_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    config = composed(tmp_path, "train.threads=3")
    place = job.Place(rank=9, world=16, local_rank=1, address="node1", port=20001)
    found = job.rank_environment(config, place, {job.DEVICES: "4,5"})
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("9", "16", "1")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("node1", "20001")
    assert (found["OMP_NUM_THREADS"], found["CUDA_VISIBLE_DEVICES"]) == ("3", "4,5")
    assert found["TRITON_CACHE_DIR"].startswith(str(tmp_path))
    assert (
        found["TRITON_CACHE_DIR"] != job.rank_environment(config, place._replace(local_rank=0), {})["TRITON_CACHE_DIR"]
    )
    assert "PYTORCH_ALLOC_CONF" not in found
    streamed = job.rank_environment(replace(config, engine="stream"), place, {})
    assert streamed["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    own = {"PYTORCH_ALLOC_CONF": "backend:native"}
    assert job.rank_environment(replace(config, engine="stream"), place, own)["PYTORCH_ALLOC_CONF"] == "backend:native"


def test_kernel_cache_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = private_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="others could plant kernels"):
        private_folder()


def test_each_life_of_a_slurm_job_meets_at_its_own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = {
        **{"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "123456", "SLURM_NTASKS": "16", "SLURM_PROCID": "9"},
        **{"SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "node[07-08]", "SLURM_NODEID": "1", "SLURM_JOB_NUM_NODES": "2"},
    }
    for name, text in slurm.items():
        monkeypatch.setenv(name, text)
    first = job.find_place(os.environ)
    assert first[:4] == (9, 16, 1, "node07")
    assert 20000 <= first.port < 32000
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    second = job.find_place(os.environ)
    monkeypatch.setenv("SLURM_JOB_ID", "123457")
    assert len({first.port, second.port, job.find_place(os.environ).port}) == 3


def test_lives_go_up_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(life.VARIABLE, "0")
    assert [life.begin_next(tmp_path) for _ in range(3)] == [0, 1, 2]
    assert os.environ[life.VARIABLE] == "2"
    life.begin(tmp_path, 5)
    with pytest.raises(runfolder.StaleAttempt):
        life.begin(tmp_path, 4)


def test_stack_file_is_no_heartbeat(tmp_path: Path) -> None:
    assert rank.stack_file(tmp_path, 3) == tmp_path / "logs" / "rank3.stacks.txt"
    (tmp_path / "logs").mkdir()
    rank.stack_file(tmp_path, 3).write_text("x")
    assert heartbeat.read_ends(tmp_path) == []
