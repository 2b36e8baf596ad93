"""What a submission consists of, without starting one: names, paths, the script, and going on with a run."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from configs import compose, console
from configs.errors import UserError
from configs.schema import Config
from slurm import job, life, sbatch, submit
from tests.standins import make_clone
from tests.submissions import composed

GOLDEN = Path(__file__).parents[1] / "data" / "sbatch.sh"


# Names and paths


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("demo", "demo"),
        ("a b'c\"d", "a_b_c_d"),
        ("größe 漢字", "größe_漢字"),
        ("../../etc", "etc"),
        ("-rf\n$(x)", "rf_x"),
        ("%j;`x`", "j_x"),
        ("...", "run"),
        ("x" * 300, "x" * 48),
    ],
)
def test_folder_name_is_safe_for_any_run_name(tmp_path: Path, name: str, slug: str) -> None:
    run = submit.name_run(dataclasses.replace(Config(), name=name, run_root=str(tmp_path)))
    assert run.parent == tmp_path
    assert re.fullmatch(re.escape(slug) + r"-\d{8}-\d{6}-[0-9a-f]{6}", run.name)
    assert len(run.name.encode()) < 255


def test_folder_names_differ(tmp_path: Path) -> None:
    config = dataclasses.replace(Config(), run_root=str(tmp_path))
    assert len({submit.name_run(config) for _ in range(50)}) == 50


@pytest.mark.parametrize("folder", ["a:b", "50%j", "line\nbreak"])
def test_run_roots_that_would_be_misread_are_refused(tmp_path: Path, folder: str) -> None:
    with pytest.raises(UserError, match="run_root"):
        submit.name_run(dataclasses.replace(Config(), run_root=str(tmp_path / folder)))


def test_relative_paths_become_absolute_where_the_user_stands(tmp_path: Path) -> None:
    config = composed(
        tmp_path, "data.train=data/../train file.jsonl", "model.path=m", "model.build=null", "run_root=out"
    )
    (tmp_path / "train file.jsonl").write_text("")
    (tmp_path / "m").mkdir()
    found = submit.resolve(config, tmp_path)
    assert found.data.train == str(tmp_path / "train file.jsonl")
    assert (found.model.path, found.run_root) == (str(tmp_path / "m"), str(tmp_path / "out"))
    assert found.data.heldout is None


@pytest.mark.parametrize("missing", ["data.train", "data.heldout", "model.path"])
def test_what_is_not_there_is_said_before_anything_is_made(tmp_path: Path, missing: str) -> None:
    (tmp_path / "t").write_text("")
    config = composed(
        tmp_path, "data.train=t", *(["model.build=null"] if missing == "model.path" else []), f"{missing}=no"
    )
    with pytest.raises(UserError, match=f"{missing}: {tmp_path}/no does not exist"):
        submit.resolve(config, tmp_path)


@pytest.mark.parametrize("key", ["data.train", "data.heldout", "model.path", "run_root"])
def test_a_home_folder_that_no_shell_has_put_in_is_not_made_where_one_stands(tmp_path: Path, key: str) -> None:
    (tmp_path / "t").write_text("")
    more = ["model.build=null"] if key == "model.path" else []
    with pytest.raises(UserError, match=f"{key}: ~/mine: only a shell knows"):
        submit.resolve(composed(tmp_path, "data.train=t", *more, f"{key}=~/mine"), tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000])
def test_a_name_that_is_too_long_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        console.run(submit.app, [name])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {'x' * 80}...: File name too long\n"


# The script


def normalised(text: str) -> str:
    return text.replace(shlex.quote(sys.executable), "PYTHON")


def test_golden_sbatch(tmp_path: Path) -> None:
    config = composed(
        tmp_path,
        *("slurm.partition=h100", "slurm.time=1-02:30:00", "slurm.account=a b", "slurm.mem=900G", "slurm.qos=high"),
        *(
            "slurm.constraint=h100&nvlink",
            "slurm.reservation=r1",
            "slurm.exclude=node[3,7]",
            "slurm.nodelist=node[1-2]",
        ),
        *(
            "slurm.dependency=afterok:17",
            'slurm.comment=it\'s "this" $HOME #1',
            "slurm.mail_user=a@b",
            "slurm.mail_type=END",
        ),
        *("slurm.container_image=/images/a b.sqsh", "slurm.setup=[module load cuda, 'export X=${HOME}']"),
        "slurm.container_mounts=/scratch:/scratch,/a b:/b",
        *("slurm.extra.switches=1@2:00:00", "slurm.extra.exclusive="),
    )
    text = normalised(sbatch.script(config, Path("/runs/it's a-20260101-000000-abcdef")))
    assert text == GOLDEN.read_text(), text


def test_script_has_no_option_that_was_not_asked_for(tmp_path: Path) -> None:
    text = sbatch.script(composed(tmp_path), Path("/runs/x"))
    options = {
        line.split("=")[0].removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")
    }
    assert options == {
        *("cpus-per-task", "gpus-per-node", "job-name", "nodes", "ntasks-per-node", "open-mode", "output"),
        *("signal", "time", "requeue"),
    }


@pytest.mark.parametrize("name", ["it's", 'a"b', "a b", "$(touch pwned)", "`x`", "größe", "a;b&&c|d", "a\\b"])
def test_script_is_safe_for_hostile_paths(tmp_path: Path, name: str) -> None:
    run = tmp_path / name / "run"
    config = composed(tmp_path, f"slurm.comment={name}", f"slurm.partition={name}")
    text = sbatch.script(config, run)
    (tmp_path / "script.sh").write_text(text)
    assert subprocess.run(["bash", "-n", tmp_path / "script.sh"], check=False).returncode == 0
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            assert len(shlex.split(line.removeprefix("#SBATCH "))) == 1
    lines = [line for line in text.splitlines() if line.startswith(("PREFIX_TRAIN_RUN", "export PYTHONPATH"))]
    shown = subprocess.run(
        ["bash", "-c", "\n".join([*lines, 'printf %s "$PYTHONPATH"'])],
        env={"PYTHONPATH": "/x"},
        capture_output=True,
        text=True,
    )
    assert shown.stdout == f"{run}/code:/x"


def test_no_preflight_where_it_is_switched_off(tmp_path: Path) -> None:
    text = sbatch.script(composed(tmp_path, "preflight.enabled=false"), Path("/runs/x"))
    assert "preflight" not in text
    assert text.index("prefix_train.cli plan") < text.index("slurm.watch") < text.index("submitit.core._submit")


def test_outer_jobs_variables_do_not_leak() -> None:
    outer = {
        **{
            "SLURM_JOB_ID": "1",
            "SLURM_MEM_PER_NODE": "1",
            "SLURMD_NODENAME": "n",
            "SBATCH_ACCOUNT": "a",
            "SRUN_DEBUG": "3",
        },
        **{
            "SUBMITIT_EXECUTOR": "slurm",
            "PMI_RANK": "0",
            "PMIX_NAMESPACE": "x",
            "RANK": "3",
            "MASTER_ADDR": "elsewhere",
            "TORCHELASTIC_RUN_ID": "x",
            "RANKS": "mine",
            "PATH": "/bin",
            "SLURM_CONF": "/etc/s",
        },
    }
    assert sbatch.without_leaks(outer) == {"RANKS": "mine", "PATH": "/bin", "SLURM_CONF": "/etc/s"}


def test_submitting_without_slurm_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"no sbatch here.*cluster=local"):
        sbatch.submit(composed(tmp_path), tmp_path)


@pytest.mark.parametrize(
    "said",
    [
        "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "sbatch: error: fetch_config: DNS SRV lookup failed\n"
        "sbatch: error: _establish_config_source: failed to fetch config\n"
        "sbatch: fatal: Could not establish a configuration source\n",
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
    ],
)
def test_where_no_slurm_answers_the_line_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    for name in ("sbatch", "srun"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\ncat >&2 <<'END'\n{said}\nEND\nexit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    with pytest.raises(UserError) as refused:
        sbatch.submit(composed(tmp_path), tmp_path)
    why = said.strip().splitlines()[-1].split(": ", 2)[2]
    assert str(refused.value).startswith(f"no Slurm answers here ({why}): submit from a login node")
    assert "give cluster=local" in str(refused.value)


def test_what_slurm_refuses_is_told_without_advice_that_does_not_help() -> None:
    said = (
        "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid partition"
    )
    told = "invalid partition specified: x; Batch job submission failed: Invalid partition"
    assert sbatch.refusal(said) == f"Slurm refused the job: {told}"


@pytest.mark.parametrize("time", ["1", "2:00", "0:02:30"])
def test_r45_limits_that_count_as_over_at_once_are_refused_at_submit(tmp_path: Path, time: str) -> None:
    """submitit takes any job of ten minutes or less for timed out; here a limit must outlast its own warning."""
    with pytest.raises(UserError, match="give more time or a shorter signal_delay_s"):
        composed(tmp_path, f"slurm.time={time}")
    assert composed(tmp_path, "slurm.time=5", "slurm.signal_delay_s=30").slurm.time == "5"


def test_r45_fails_without_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from submitit.core.job_environment import JobEnvironment, SignalHandler
    from submitit.core.utils import DelayedSubmission, JobPaths

    call = DelayedSubmission(job.run_rank, "x")
    call.set_timeout(5, 3)
    monkeypatch.setattr(JobEnvironment, "__new__", lambda cls: object.__new__(cls))
    assert SignalHandler(JobEnvironment(), JobPaths(tmp_path), call).has_timed_out()
    monkeypatch.setattr("configs.rules.SIGNAL_SLACK_S", -10_000)
    assert composed(tmp_path, "slurm.time=1").slurm.time == "1"


# Speed and imports


def test_submitting_imports_no_torch_and_is_quick(tmp_path: Path) -> None:
    clone = make_clone(tmp_path / "clone")
    code = (
        "import sys, runpy; sys.argv = ['submit', 'standin.yaml', '--dry-run', 'cluster=slurm']\n"
        "try: runpy.run_module('slurm.submit', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], cwd=clone, check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


# Going on


@pytest.mark.parametrize("name", ["attempt", "job", "result.json", "heartbeat/rank0.json", "logs/rank0.json"])
def test_going_on_with_a_damaged_run_names_the_file(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(life.VARIABLE, raising=False)
    monkeypatch.setattr(submit, "is_frozen", lambda run: True)
    (tmp_path / "code" / "slurm").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(compose.to_yaml(composed(tmp_path)))
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    for damage in (b"", b'{"half', b"\0", b"\xff", b"[]"):
        path.write_bytes(damage)
        with pytest.raises(SystemExit) as ended:
            console.run(submit.app, [str(tmp_path)])
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert said.startswith(f"error: {path}")
        assert said.count("\n") == 1


def test_a_result_that_failed_its_verification_can_be_gone_on_with(tmp_path: Path) -> None:
    for text, complete in (
        ("{}", True),
        ('{"verify": {"passed": true}}', True),
        ('{"verify": {"passed": false}}', False),
    ):
        (tmp_path / "result.json").write_text(text)
        assert submit.is_complete(tmp_path) is complete
