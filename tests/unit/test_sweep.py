"""Sweeps: which runs they make, what they refuse, and the array's script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from configs.errors import UserError
from slurm.sweep import combinations
from tests.standins import make_clone, submit


def test_combinations_are_all_and_in_order() -> None:
    assert combinations(["train.lr=1e-4,2e-4", "seed=0,1"]) == [
        ["train.lr=1e-4", "seed=0"],
        ["train.lr=1e-4", "seed=1"],
        ["train.lr=2e-4", "seed=0"],
        ["train.lr=2e-4", "seed=1"],
    ]


def test_commas_within_brackets_and_quotes_separate_nothing() -> None:
    assert combinations(["adapter.targets=[q,v],[k]"]) == [["adapter.targets=[q,v]"], ["adapter.targets=[k]"]]
    assert combinations(["model.build={a: 1, b: 2},{a: 3}"])[0] == ["model.build={a: 1, b: 2}"]
    assert combinations(["slurmy='a,b',c"]) == [["slurmy='a,b'"], ["slurmy=c"]]


@pytest.mark.parametrize(
    ("sweeps", "says"),
    [
        (["train.lr"], "write KEY=VALUE,VALUE,..."),
        (["=1,2"], "write KEY=VALUE,VALUE,..."),
        (["train.lr=1"], "1 run; give between 2 and 1000"),
        (["seed=" + ",".join("0" * 40), "train.lr=" + ",".join("1" * 40)], "1,600 runs"),
        ([f"option{number}=" + ",".join("0" * 900) for number in range(9)], f"{900**9:,} runs"),
        (["slurm.nodes=1,2"], "slurm.nodes is the same for all runs of a sweep"),
        ([" slurm.nodes =1,2"], "slurm.nodes is the same for all runs of a sweep"),
        (["seed=1,2", "seed =3,4"], "seed is given twice"),
        (["cluster=local,slurm"], "cluster is the same"),
        (["seed=1,2", "seed=3,4"], "seed is given twice"),
    ],
)
def test_what_cannot_be_swept(sweeps: list[str], says: str) -> None:
    with pytest.raises(UserError, match="--sweep") as caught:
        combinations(sweeps)
    assert says in str(caught.value)


def test_script_of_an_array(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    done = submit(clone, "cluster=slurm", "--sweep", "train.lr=1e-4,2e-4,3e-4", "--dry-run", f"run_root={tmp_path}/r s")
    assert done.returncode == 0, done.stderr
    folder = done.stdout.splitlines()[0].removeprefix("sweep   ")
    assert "\n1       train.lr=2e-4\n" in done.stdout
    assert "#SBATCH --array=0-2%" in done.stdout
    assert f"PREFIX_TRAIN_RUN='{folder}'/\"$SLURM_ARRAY_TASK_ID\" " in done.stdout
    assert f"#SBATCH --output='{folder}/%a/logs/job-%j.log'" in done.stdout
    assert not Path(folder).exists()


def test_sweep_on_one_machine_and_a_bad_value_are_refused(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    for arguments, says in ((("--sweep", "seed=0,1"), "cluster is local"), (("--sweep", "train.lr=0.1,x"), "train.lr")):
        done = submit(clone, *arguments, f"run_root={tmp_path}/runs")
        assert done.returncode == 2
        assert says in done.stderr
    assert not (tmp_path / "runs").exists()


def test_commands_name_themselves() -> None:
    done = subprocess.run([sys.executable, "-m", "slurm.submit", "--help"], capture_output=True, text=True, check=True)
    assert "--sweep" in done.stdout
