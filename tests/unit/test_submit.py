"""What a submission consists of, without starting one: names, paths, script, frozen code, the job's exit status."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from configs import compose, console, runfolder
from configs.errors import UserError
from configs.nodefolder import private_folder
from configs.schema import Config
from prefix_train import budget, cli, heartbeat, lengths, plan_summary
from slurm import acts, finish, freeze, job, life, planned, rank, sbatch, submit, verdict
from tests import chats, exported
from tests.standins import make_clone

GOLDEN = Path(__file__).parents[1] / "data" / "sbatch.sh"

YAML = """
model: {build: {model_type: qwen3}}
data: {train: /data/train.jsonl}
pack: {packs_per_update: 16}
train: {updates: 3}
slurm: {nodes: 2, tasks_per_node: 8, gpus_per_node: 8, cpus_per_task: 12}
"""


def composed(tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    return compose.load(path, overrides)


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


# The plan


def with_index(tmp_path: Path, count: int, *overrides: str) -> Config:
    """A configuration whose data has a length index: a shared beginning of 50 tokens, then 2 for each example."""
    (tmp_path / "train.jsonl").write_text("{}\n" * count)
    config = composed(
        tmp_path, f"data.train={tmp_path}/train.jsonl", f"run_root={tmp_path}/runs", "pack.max_positions=96", *overrides
    )
    rows = [
        SimpleNamespace(source=f"train.jsonl:{i}", keys=np.r_[np.ones(50, int), -i, i], target=np.arange(52) > 50)
        for i in range(1, count + 1)
    ]
    lengths.write(lengths.index_path(config), lengths.build(config, rows))
    return config


def test_updates_of_epochs_that_differ_are_told_as_those_of_the_first(tmp_path: Path) -> None:
    """An example that makes one pack more now and then makes one update more; else every epoch has as many."""
    config = with_index(tmp_path, 64, "train.updates=null", "train.epochs=2")
    for total, said in (
        (2, "plan    2 updates, 1 per epoch; "),
        (3, "plan    3 updates, 1 in the first of 2 epochs; "),
    ):
        found = planned.sketch(config)
        found["known"]["updates_in_run"] = total
        assert planned.lines(config, found)[0].startswith(said)
        told = plan_summary.summary(lengths.run_plan(config, lengths.load(config)).epoch(0))
        per_epoch = "per epoch" if total == 2 else "in the first of 2 epochs, 3 in all,"
        text = plan_summary.told(told | {"updates_in_run": total, "epochs": 2.0})
        assert f"\nupdates       1 {per_epoch} on {config.ranks} ranks: 16 packs and 64 examples per update\n" in text


def test_plan_is_told_from_the_length_index(tmp_path: Path) -> None:
    config = with_index(tmp_path, 64, "memory.offload=auto")
    found = planned.sketch(config)["known"]
    assert (found["examples"], found["logical_tokens"], found["updates_in_run"]) == (64, 64 * 52, 3)
    assert found["positions"] == found["packs"] * 50 + 128
    plan, memory = planned.lines(config, {"known": found})
    assert plan.startswith("plan    3 updates, 1 per epoch; 64 examples in")
    expected = budget.predict(config, lengths.largest_pack(config, lengths.load(config)))
    sizes = {"gpu_bytes": expected.total("gpu"), "host_bytes_per_node": expected.total("host")}
    assert found["memory"] == {"positions": expected.shape.positions, **sizes}
    assert sizes["host_bytes_per_node"] > 0
    gpu, host = (size / budget.GIB for size in sizes.values())
    assert memory == (
        f"memory  {gpu:.1f} GiB on each GPU, {host:.1f} GiB pinned on each node, predicted for the largest pack "
        f"({expected.shape.positions} positions)"
    )


def test_much_data_is_counted_not_planned_and_memory_is_that_of_one_full_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned, "MOST_EXAMPLES", 63)
    config = with_index(tmp_path, 64, "memory.offload=auto")
    found = planned.sketch(config)["known"]
    expected = budget.predict(config)
    sizes = {"gpu_bytes": expected.total("gpu"), "host_bytes_per_node": expected.total("host")}
    counted = {"examples": 64, "logical_tokens": 64 * 52, "least_positions": 50 + 128}
    assert found == {**counted, "memory": {"positions": 96, **sizes}}
    plan, memory = planned.lines(config, {"known": found})
    assert plan.startswith("plan    64 examples of 3,328 tokens, 178 positions at best; packs and updates:")
    gpu, host = (size / budget.GIB for size in sizes.values())
    assert memory == (
        f"memory  {gpu:.1f} GiB on each GPU, {host:.1f} GiB pinned on each node, predicted for one example as long as "
        "pack.max_positions (96 positions)"
    )


def test_without_a_fitting_index_it_is_said_why(tmp_path: Path) -> None:
    found = planned.sketch(composed(tmp_path, f"run_root={tmp_path}"))
    assert "there is no length index yet" in found["unknown"]
    plan, memory = planned.lines(Config(), found)
    assert plan == f"plan    {planned.NO_INDEX}"
    assert memory == "memory  not known without a plan"
    config = with_index(tmp_path, 8)
    Path(config.data.train).write_text("changed")
    assert "was made for something else: data" in planned.lines(config, planned.sketch(config))[0]


@pytest.mark.parametrize("model", ["m", "../here/m", "package:carrier_of_models/m"])
def test_the_plan_of_relative_paths_is_found_when_submitting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    here, carrier = tmp_path / "here", tmp_path / "carrier_of_models"
    for folder in (here, carrier):
        folder.mkdir()
    exported.model_folder((carrier if model.startswith("package:") else here) / "m")
    (carrier / "__init__.py").touch()
    chats.write(tmp_path / "d.jsonl", [chats.row(f"Which is {n}?") for n in range(4)])
    config = {
        "cluster": "local",
        "model": {"path": model},
        "data": {"train": "../d.jsonl"},
        "pack": {"packs_per_update": 1},
        "train": {"updates": 1},
        "slurm": {"tasks_per_node": 1},
    }
    (here / "c.yaml").write_text(json.dumps(config))
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(tmp_path))
    cli.plan_command(Path("c.yaml"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        console.run(submit.app, ["c.yaml", "--dry-run"])
    told = capsys.readouterr()
    assert (ended.value.code, told.err) == (0, "")
    assert "\nplan    1 update, 1 per epoch; 4 examples in" in told.out


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


# How the job ended


def end(run: Path, number: int, **how: object) -> None:
    heartbeat.ended(run, number, 2, **how)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(life.VARIABLE, raising=False)
    return tmp_path


def test_r47_success_needs_the_result_and_status_zero(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end(run, 0, status=0)
    end(run, 1, status=0)
    assert finish.conclude(run, 0)[:2] == (1, "failed: all ranks ended well, but there is no result.json")
    (run / "result.json").write_text("{}")
    assert finish.conclude(run, 0)[:2] == (0, f"complete; {run}/result.json")
    assert finish.conclude(run, 143).status == 143
    end(run, 1, status=3)
    assert finish.conclude(run, 0).status == 3


def test_r47_fails_without_fix(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file that every run has stands for the final result, ranks that made none have a complete run."""
    end(run, 0, status=0)
    end(run, 1, status=0)
    (run / runfolder.PLAN).write_text("{}")
    assert finish.conclude(run, 0).status != 0
    monkeypatch.setattr(runfolder, "RESULT", runfolder.PLAN)
    assert finish.conclude(run, 0)[:2] == (0, f"complete; {run}/{runfolder.PLAN}")


def test_status_is_that_of_the_rank_that_failed_first(run: Path) -> None:
    end(run, 1, signal=9)
    end(run, 0, error=RuntimeError("Connection closed\nby peer"))
    found = finish.conclude(run, 143)
    assert found.status == 137
    assert "rank 1 on" in found.line
    assert "SIGKILL" in found.line


def test_status_of_an_exception_and_of_a_mistake(run: Path) -> None:
    end(run, 0, error=UserError("data.train: bad"))
    found = finish.conclude(run, 0)
    assert found.status == 2
    assert found.line.endswith("data.train: bad")


def test_rank_without_a_word_and_ranks_of_an_earlier_life(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end(run, 0, status=0)
    assert finish.conclude(run, 0).line == "failed: rank 1 left no word of how it ended"
    end(run, 1, status=7)
    (run / "attempt").write_text("1")
    (run / "result.json").write_text("{}")
    assert finish.conclude(run, 0).status == 1
    monkeypatch.setenv(life.VARIABLE, "1")
    end(run, 0, status=0)
    end(run, 1, status=0)
    assert finish.conclude(run, 0)[:2] == (0, f"complete; {run}/result.json")


def test_run_that_saved_and_stopped_is_neither_complete_nor_failed(run: Path) -> None:
    end(run, 0, status=runfolder.STOPPED)
    end(run, 1, status=runfolder.STOPPED)
    found = finish.conclude(run, 0)
    assert found.status == runfolder.STOPPED
    assert found.line == f"stopped as asked, with a checkpoint; to go on: python -m slurm.submit {run}"
    end(run, 1, signal=9)
    assert finish.conclude(run, 0).status == 137


def test_complete_says_how_well_it_answers(run: Path) -> None:
    end(run, 0, status=0)
    end(run, 1, status=0)
    (run / "result.json").write_text('{"accuracy": 0.97, "chance": 0.1}')
    assert finish.conclude(run, 0).line == f"complete: answered exactly 97.0% (chance 10%); {run}/result.json"


def test_interrupted_run_says_where_it_is_and_a_failure_stays_one(run: Path) -> None:
    killed = finish.Outcome(137, "failed: rank 0 was ended by SIGKILL", "died", (0,))
    assert finish.interrupted(run, killed, 0) is killed
    go_on = f"to go on: python -m slurm.submit {run}"
    assert finish.interrupted(run, killed, 2)[:2] == (
        130,
        f"interrupted before training; nothing is saved yet; {go_on}",
    )
    heartbeat.Heartbeat(run, 0, 1).phase("forward", 13)
    for name in ("update-000002", "update-000012", ".update-000013.tmp", "update-000014.tmp"):
        (run / "checkpoints" / name).mkdir(parents=True)
    assert finish.interrupted(run, killed, 15)[:2] == (143, f"interrupted in update 13; saved after update 12; {go_on}")
    full = finish.Outcome(1, "failed: rank 0 raised OSError: no space left", "raised")
    assert finish.interrupted(run, full, 2) is full


def test_hang_has_its_own_status(run: Path) -> None:
    end(run, 0, signal=9)
    for number, stuck in (("9", False), ("10", True)):
        found = verdict.Verdict(0, "missing_rank", stuck, (1,), f"rank 1 is stopped {number}")
        verdict.write(run / "hangs" / number, found, run)
    assert finish.conclude(run, 137)[:2] == (79, "stuck: rank 1 is stopped 10")
    verdict.write(run / "hangs" / "11", verdict.Verdict(0, "unknown", True, (), "no rank can be named"), run)
    assert finish.conclude(run, 137)[:2] == (79, "stuck: rank 1 is stopped 10")
    assert verdict.latest(run, 1) is None


def test_gate_has_its_own_status_and_names_the_reason(run: Path) -> None:
    folder = run / "preflight" / "0"
    folder.mkdir(parents=True)
    (folder / "report.txt").write_text("FAIL node3: import.torch\nmore\n")
    found = finish.act_failed(run, "gate", 1)
    assert found.status == 78
    assert "FAIL node3: import.torch" in found.line
    assert finish.act_failed(run, "plan", 2).status == 2


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
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_stack_file_is_no_heartbeat(tmp_path: Path) -> None:
    assert rank.stack_file(tmp_path, 3) == tmp_path / "logs" / "rank3.stacks.txt"
    (tmp_path / "logs").mkdir()
    rank.stack_file(tmp_path, 3).write_text("x")
    assert heartbeat.read_ends(tmp_path) == []


@pytest.mark.parametrize("name", ["attempt", "job", "result.json", "heartbeat/rank0.json", "logs/rank0.json"])
def test_going_on_with_a_damaged_run_names_the_file(
    run: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "is_frozen", lambda run: True)
    (run / "code" / "slurm").mkdir(parents=True)
    (run / "config.yaml").write_text(compose.to_yaml(composed(run)))
    path = run / name
    path.parent.mkdir(exist_ok=True)
    for damage in (b"", b'{"half', b"\0", b"\xff", b"[]"):
        path.write_bytes(damage)
        with pytest.raises(SystemExit) as ended:
            console.run(submit.app, [str(run)])
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert said.startswith(f"error: {path}")
        assert said.count("\n") == 1


def test_a_result_that_failed_its_verification_can_be_gone_on_with(run: Path) -> None:
    for text, complete in (
        ("{}", True),
        ('{"verify": {"passed": true}}', True),
        ('{"verify": {"passed": false}}', False),
    ):
        (run / "result.json").write_text(text)
        assert submit.is_complete(run) is complete
