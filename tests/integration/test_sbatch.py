"""The sbatch script, run by bash with stand-ins for Slurm's programs: every act, and what each failure leads to."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests import fake_slurm
from tests.standins import make_clone, run_folder, seen, submit, submit_command


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
    gate = next(line for line in script.read_text().splitlines() if "preflight judge" in line)
    script.write_text(script.read_text().replace(gate, gate.partition(" || ")[0]))
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
    module.write_text(module.read_text().replace("START_S = 60", "START_S = 61"))
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
