"""The sbatch script, run by bash with stand-ins for Slurm's programs: every act, and what each failure leads to."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from configs import compose
from prefix_train import lengths
from tests import fake_slurm
from tests.standins import ROOT, make_clone, run_folder, seen, submit, submit_command

TARGET = np.arange(921) > 910


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_slurm.install(tmp_path_factory.mktemp("slurm") / "bin")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return make_clone(tmp_path / "clone")


def submitted(clone: Path, programs: Path, *arguments: str, **environment: str) -> tuple[Path, Path]:
    """Submit to the stand-in; the run folder, and the script as Slurm got it."""
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = submit(clone, "cluster=slurm", "--json", *arguments, **{**path, **environment})
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    run = Path(document["run"])
    assert document["job"] == "4711"
    assert (run / "submitit").stat().st_mode & 0o777 == 0o700
    script = run / "submitit" / "4711_submission.sh"
    assert script.read_text().strip() == (run / "submit.sh").read_text().strip()
    return run, script


def test_job_runs_to_its_end_also_in_a_folder_with_a_hostile_name(clone: Path, programs: Path, tmp_path: Path) -> None:
    root = tmp_path / 'it\'s "my" $(runs) größe'
    outer = {"SLURM_JOB_ID": "1", "SBATCH_ACCOUNT": "a", "SLURM_CONF": "/etc/slurm.conf"}
    run, script = submitted(clone, programs, f"run_root={root}", "slurm.setup=[export FROM_SETUP='a b']", **outer)
    done = fake_slurm.run_script(script, programs, tasks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"complete: answered exactly 93.0%; {run}/result.json"
    for rank in (0, 1):
        found = seen(run, rank)
        assert found["train"] == str(run / "code" / "prefix_train" / "train.py")
        assert found["environment"]["FROM_SETUP"] == "a b"
        assert found["environment"]["MASTER_ADDR"] == os.uname().nodename


def test_r42_gate_ends_the_job_before_training(clone: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, script = submitted(clone, programs)
    monkeypatch.setenv("STANDIN_JUDGE_STATUS", "1")
    done = fake_slurm.run_script(script, programs, tasks=2)
    assert done.returncode == 78
    assert "node7: import.torch: 2.9 instead of 2.13" in done.stderr.splitlines()[-1]
    assert not (run / "seen").exists()


def test_r42_fails_without_fix(clone: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, script = submitted(clone, programs)
    monkeypatch.setenv("STANDIN_JUDGE_STATUS", "1")
    lines = script.read_text().splitlines()
    script.write_text("\n".join(line.partition(" || ")[0] if "preflight judge" in line else line for line in lines))
    assert fake_slurm.run_script(script, programs, tasks=2).returncode == 0
    assert (run / "seen").exists()


@pytest.mark.parametrize(
    ("override", "environment", "status", "says"),
    [
        ("slurm.setup=[true && false]", {}, 1, "setup line 1 ended with status 1; training did not start"),
        ("slurm.setup=['nonsense # why']", {}, 127, "setup line 1 ended with status 127"),
        ("seed=1", {"STANDIN_PLAN_STATUS": "2"}, 2, "plan ended with status 2; training did not start"),
    ],
)
def test_an_act_that_fails_ends_the_job(
    clone: Path,
    programs: Path,
    monkeypatch: pytest.MonkeyPatch,
    override: str,
    environment: dict[str, str],
    status: int,
    says: str,
) -> None:
    run, script = submitted(clone, programs, override)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    done = fake_slurm.run_script(script, programs, tasks=2)
    assert done.returncode == status
    assert says in done.stderr.splitlines()[-1]
    assert not (run / "seen").exists()


def test_r43_status_of_the_job_is_the_trainings(clone: Path, programs: Path) -> None:
    """Five, from the rank itself; srun says 143."""
    run, script = submitted(clone, programs, "model.build.do=five")
    done = fake_slurm.run_script(script, programs, tasks=2)
    assert done.returncode == 5
    assert "rank 1 on" in done.stderr.splitlines()[-1]
    assert json.loads((run / "logs" / "rank1.json").read_text())["status"] == 5


def test_r43_fails_without_fix(clone: Path, programs: Path) -> None:
    _, script = submitted(clone, programs, "model.build.do=five")
    text = script.read_text()
    before, _, _ = text.partition("# teardown\n")
    script.write_text(before + "echo cleaned up\n")
    assert fake_slurm.run_script(script, programs, tasks=2).returncode == 0


def test_refused_submission_is_one_line_and_leaves_nothing(clone: Path, programs: Path) -> None:
    path = f"{programs}:{os.environ['PATH']}"
    done = submit(clone, "cluster=slurm", "slurm.partition=nope", PATH=path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: Slurm refused the job:")
    assert "invalid partition specified: nope" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert list((clone / "runs").iterdir()) == []


def test_submitting_a_run_submits_its_job_again_with_its_own_code(clone: Path, programs: Path) -> None:
    run, script = submitted(clone, programs)
    before = script.read_text()
    script.unlink()
    module = clone / "slurm" / "sbatch.py"
    module.write_text(module.read_text().replace('FOLDER = "submitit"', 'FOLDER = "other"'))
    command, env = submit_command(clone, PATH=f"{programs}:{os.environ['PATH']}")
    again = [word if not word.endswith(".yaml") else str(run) for word in command]
    for extra in (["--dry-run"], ["--json"]):
        done = subprocess.run([*again, *extra], env=env, cwd=clone, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[1] == "resume  nothing is saved yet"
        assert script.exists() == (extra == ["--json"])
    assert json.loads(done.stdout.splitlines()[-1]) == {"run": str(run), "job": "4711"}
    assert script.read_text() == before


def test_two_submissions_at_once_have_their_own_folders(clone: Path, programs: Path) -> None:
    command, env = submit_command(clone, "cluster=slurm", PATH=f"{programs}:{os.environ['PATH']}")
    both = [subprocess.Popen(command, cwd=clone, env=env, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert len(list((clone / "runs").iterdir())) == 2
    with pytest.raises(ValueError, match="too many values"):
        run_folder(clone / "runs")


def go_on(clone: Path, run: Path, programs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Submit the run folder itself."""
    command, env = submit_command(clone, PATH=f"{programs}:{os.environ['PATH']}")
    again = [str(run) if word.endswith(".yaml") else word for word in command]
    return subprocess.run([*again, *arguments], env=env, cwd=clone, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("squeue", "status", "says"),
    [
        ("echo '4711|PENDING|Resources'", 2, "its job 4711 is PENDING (Resources), and goes on with it"),
        ("echo '4711|RUNNING|None'", 2, "its job 4711 is RUNNING (None), and goes on with it"),
        ("echo '4711|COMPLETED|None'", 0, ""),
        ("echo '47110|RUNNING|None'", 0, ""),
        ("echo 'no controller' >&2; exit 1", 0, "whether job 4711 of this run is still in the queue is not known"),
    ],
)
def test_a_run_whose_job_is_still_queued_is_not_submitted_twice(
    clone: Path, programs: Path, tmp_path: Path, squeue: str, status: int, says: str
) -> None:
    run, script = submitted(clone, programs)
    script.unlink()
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "squeue").write_text(f"#!/bin/sh\n{squeue}\n")
    (tmp_path / "queue" / "squeue").chmod(0o755)
    done = go_on(clone, run, Path(f"{tmp_path}/queue:{programs}"))
    assert done.returncode == status, done.stderr
    assert len(done.stderr.splitlines()) == (1 if says else 0)
    assert says in done.stderr
    assert script.exists() == (status == 0)


def test_job_that_cannot_be_recorded_is_taken_back(clone: Path, programs: Path) -> None:
    """Between sbatch and the run folder the disk fills up: nobody could find the job again."""
    (programs / "scancel").write_text(f'#!/bin/sh\necho "$@" >{clone}/cancelled\n')
    (programs / "scancel").chmod(0o755)
    module = clone / "slurm" / "sbatch.py"
    full = 'raise OSError(28, "No space left on device", "job")'
    module.write_text(module.read_text().replace("runfolder.write_text(run / runfolder.JOB", f"{full}; (run"))
    done = submit(clone, "cluster=slurm", PATH=f"{programs}:{os.environ['PATH']}")
    assert done.returncode == 2
    assert done.stderr == "error: [Errno 28] No space left on device: 'job'; job 4711 was cancelled\n"
    assert (clone / "cancelled").read_text() == "4711\n"
    assert list((clone / "runs").iterdir()) == []


WITHOUT_TORCH = """
import runpy, sys
try:
    runpy.run_module("slurm.submit", run_name="__main__", alter_sys=True)
finally:
    heavy = {"torch", "transformers", "accelerate", "peft"} & set(sys.modules)
    assert not heavy, heavy
"""


def timed(argv: list[str], env: dict[str, str]) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a program; its seconds of CPU, for that may be shared."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{seconds:.2f} s of CPU, {wall:.2f} s in all")
    return done, seconds


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_submitting_takes_less_than_a_second_and_no_torch(programs: Path, tmp_path: Path, dry: tuple[str, ...]) -> None:
    """The real source and 5,000 examples whose lengths are known; of two tries the faster one counts."""
    data = tmp_path / "train.jsonl"
    data.write_text("{}\n" * 5000)
    place = (f"run_root={tmp_path}/runs", f"data.train={data}", "cluster=slurm", "evaluate.every=0")
    options = (*place, "data.heldout=null", "verify.examples=0", "pack.packs_per_update=4", "slurm.nodes=2")
    config = compose.load(ROOT / "configs" / "digits.yaml", options)
    rows = [
        SimpleNamespace(source=f"train.jsonl:{i}", keys=np.r_[np.ones(900, int), np.full(20, -i), i], target=TARGET)
        for i in range(1, 5001)
    ]
    lengths.write(lengths.index_path(config), lengths.build(config, rows))
    argv = [sys.executable, "-c", WITHOUT_TORCH, str(ROOT / "configs" / "digits.yaml"), *options, *dry]
    env = {name: text for name, text in os.environ.items() if name != "PREFIX_TRAIN_ATTEMPT"}
    env["PATH"] = f"{programs}:{os.environ['PATH']}"
    done, seconds = min((timed(argv, env) for _ in range(2)), key=lambda one: one[1])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    names = ("run", "plan", "memory", "follow", "logs") if dry else ("run", "plan", "memory", "job", "follow", "logs")
    assert tuple(line.split()[0] for line in lines[: len(names)]) == names
    assert "5,000 examples in" in lines[1]
    assert "of tensors in each rank, predicted for the largest pack" in lines[2]
    run = Path(lines[0].split()[1])
    logs = f"{run}/logs/rank0.log" if dry else f"{run}/logs/job-4711.log {run}/logs/rank0.log"
    assert lines[len(names) - 2 : len(names)] == [
        f"follow  python -m slurm.status {run}",
        f"logs    tail -F {logs}",
    ]
    assert seconds < 1
