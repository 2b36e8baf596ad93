"""How runs stand: what Slurm says, what the run folder says, and where the two differ."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs import compose, console, runfolder
from configs.errors import UserError
from configs.schema import Config, DataConfig, ModelConfig, PackConfig, SlurmConfig, TrainConfig, WatchConfig
from prefix_train import heartbeat
from slurm import life, presence, scheduler, standing, status
from slurm.policy import Life
from slurm.scheduler import JobState, NoAnswer

RUNNING = JobState("RUNNING", "None", "squeue")
FAILED = JobState("FAILED", "NonZeroExitCode", "squeue")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make(tmp_path / "demo-1")


def make(run: Path, nodes: int = 1, tasks: int = 2) -> Path:
    """A run folder as submit leaves it."""
    config = Config(
        data=DataConfig(train="t.jsonl"),
        model=ModelConfig(build={"model_type": "x"}),
        pack=PackConfig(packs_per_update=nodes * tasks),
        train=TrainConfig(updates=40),
        watch=WatchConfig(floor_s=3, first_update_s=60),
        slurm=SlurmConfig(nodes=nodes, tasks_per_node=tasks),
    )
    (run / "logs").mkdir(parents=True)
    runfolder.write_text(run / "config.yaml", compose.to_yaml(config))
    (run / "job").write_text("4711\n")
    return run


def report(run: Path, updates: int) -> None:
    """metrics.jsonl after `updates` updates of two seconds."""
    lines = [
        {"update": number, "loss": 3.0 / number, "logical_tokens_per_s": 1234.0, "seconds": 2.0}
        for number in range(1, updates + 1)
    ]
    lines.append({"update": updates, "heldout_loss": 1.0})  # type: ignore[dict-item]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_running_job(run: Path) -> None:
    for rank, update in enumerate((11, 10)):
        heartbeat.Heartbeat(run, rank, 2).phase("forward", update)
    report(run, 10)
    found = standing.look(run, RUNNING, time.time())
    assert (found.job, found.attempt, found.heard, found.ranks) == ("4711", 0, 2, 2)
    assert (found.update, found.updates, found.loss) == (10, 40, 0.3)
    assert found.left_s == 60.0
    assert found.phase == "first_update of update 10"
    assert found.doubts == ()
    page = status.page(found)
    assert "update   10 of 40, loss 0.3000, 1,234 logical tokens/s, 0:01:00 left" in page
    assert "job 4711: RUNNING (None; squeue says so)" in page


def test_job_that_has_not_begun(run: Path) -> None:
    found = standing.look(run, JobState("PENDING", "Resources", "squeue"), time.time())
    assert (found.heard, found.phase, found.left_s) == (0, None, None)
    assert "Resources" in status.page(found)
    assert "0 of 40" in status.page(found)


def test_slurm_says_running_and_the_ranks_are_late(run: Path) -> None:
    heartbeat.Heartbeat(run, 0, 2).phase("forward", 1)
    found = standing.look(run, RUNNING, time.time() + 100)
    assert len(found.doubts) == 1
    assert "Slurm says RUNNING, but rank 0 is late: phase first_update has taken 100" in found.doubts[0]


def test_slurm_says_it_is_over_and_a_rank_lives(run: Path) -> None:
    heartbeat.Heartbeat(run, 0, 2).phase("forward", 1)
    found = standing.look(run, FAILED, time.time() + 5)
    assert found.doubts[0].startswith("Slurm says FAILED, but rank 0 on ")
    assert found.doubts[0].endswith(" was alive 5 s ago")
    assert found.doubts[0] in status.table([found])


def test_a_node_whose_watcher_has_died(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat.Heartbeat(run, 0, 2).phase("forward", 1)
    presence.say(run, 0)
    assert standing.look(run, RUNNING, time.time()).unwatched == ()
    monkeypatch.setattr(presence, "runs", lambda *_: False)
    assert presence.check(run, 0)
    found = standing.look(run, RUNNING, time.time())
    (said,) = found.unwatched
    assert said.startswith(f"the watcher of {socket.gethostname()} died at ")
    assert f"watch    {said}" in status.page(found)
    assert said in status.table([found])
    assert json.loads(json.dumps(found.document()))["unwatched"] == [said]
    (run / "attempt").write_text("1\n")
    assert standing.look(run, RUNNING, time.time()).unwatched == (), "it was of an earlier life"


def test_slurm_says_completed_without_a_result_and_failed_with_one(run: Path) -> None:
    completed = JobState("COMPLETED", "exit 0:0", "sacct")
    assert standing.look(run, completed, 0.0).doubts == ("Slurm says COMPLETED, but there is no result.json",)
    (run / "result.json").write_text('{"heldout_loss": 0.125, "accuracy": 0.93}')
    assert standing.look(run, completed, 0.0).doubts == ()
    found = standing.look(run, FAILED, 0.0)
    assert found.doubts == ("Slurm says FAILED, but there is a result.json",)
    assert found.end == "complete, heldout loss 0.125, accuracy 0.93"


def test_half_a_line_of_metrics_is_left_out(run: Path) -> None:
    report(run, 2000)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"update": 2001, "lo')
    assert standing.look(run, None, 0.0).update == 2000


def answers(monkeypatch: pytest.MonkeyPatch, **programs: str | NoAnswer) -> None:
    def ask(program: str, *rest: str, timeout_s: float = 0) -> str:
        found = programs[program]
        if isinstance(found, NoAnswer):
            raise found
        return found

    monkeypatch.setattr(scheduler, "ask", ask)


def test_states_come_from_squeue_and_then_from_sacct(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, squeue="7|RUNNING|None\n8_1|PENDING|(Priority|x)\n", sacct="9|CANCELLED by 0|0:15\n")
    found, silences = scheduler.job_states(["7", "8_1", "9", "10"])
    assert silences == []
    assert found == {
        "7": JobState("RUNNING", "None", "squeue"),
        "8_1": JobState("PENDING", "(Priority|x)", "squeue"),
        "9": JobState("CANCELLED by 0", "exit 0:15", "sacct"),
    }
    assert found["9"].over
    assert not found["8_1"].over


def test_programs_that_do_not_answer_are_said(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    answers(monkeypatch, squeue=NoAnswer("squeue: not found"), sacct=NoAnswer("sacct: no answer in 10 s"))
    found, silences, _ = status.look_at([run])
    assert found[0].slurm is None
    assert silences == ["squeue: not found", "sacct: no answer in 10 s"]
    assert "job 4711: not known" in status.page(found[0])


def test_time_limit_of_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = tmp_path / "sinfo"
    deaf.write_text("#!/bin/sh\nexec sleep 60\n")
    deaf.chmod(0o755)
    with pytest.raises(NoAnswer, match=r"sinfo -h: no answer in 0.2 s"):
        scheduler.ask(str(deaf), "-h", timeout_s=0.2)
    with pytest.raises(NoAnswer, match="not found"):
        scheduler.ask(str(tmp_path / "nothing"))


def test_command(tmp_path: Path, run: Path) -> None:
    make(tmp_path / "demo-2")
    command = [sys.executable, "-m", "slurm.status", "--root", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tmp_path)}, timeout=60)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert sorted(Path(one["run"]).name for one in document["runs"]) == ["demo-1", "demo-2"]
    assert document["silent"] == ["squeue: not found", "sacct: not found"]
    nowhere = subprocess.run([*command[:3], str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert nowhere.returncode == 2
    assert nowhere.stderr == f"error: {tmp_path} is not a run folder: it has no config.yaml\n"


def test_512_nodes_of_8_ranks_are_read_in_seconds(tmp_path: Path) -> None:
    run = make(tmp_path / "big", nodes=512, tasks=8)
    heartbeat.Heartbeat(run, 0, 4096).phase("forward", 7)
    beat = json.loads((run / "heartbeat" / "rank0.json").read_text())
    for rank in range(4096):
        beat |= {"rank": rank, "host": f"node{rank // 8}", "update": 6 if rank == 3001 else 7}
        (run / "heartbeat" / f"rank{rank}.json").write_text(json.dumps(beat))
    before = time.process_time()
    found = standing.look(run, RUNNING, time.time())
    assert time.process_time() - before < 2
    assert (found.heard, found.phase) == (4096, "first_update of update 6")


WATCH = WatchConfig(poll_s=1e-05, factor=3, load_s=1e-22, floor_s=0.1, first_update_s=60)
CONFIGS: list[dict[str, Any]] = [
    {},
    {"cluster": "debug", "slurm": SlurmConfig(nodes=1, tasks_per_node=3)},
    {"cluster": "local", "slurm": SlurmConfig(nodes=1, tasks_per_node=3, partition="null", comment="a\n'b': [c")},
    {"train": TrainConfig(epochs=0.5)},
    {"train": TrainConfig(updates=7), "watch": WATCH},
    {"name": "slurm: {nodes: 9}\n", "model": ModelConfig(build={"watch": {"poll_s": [1, None, "x"]}, "a": "on"})},
]


@pytest.mark.parametrize("given", CONFIGS, ids=str)
@pytest.mark.parametrize("in_c", [True, False])
def test_options_are_those_of_the_whole_configuration(
    tmp_path: Path, given: dict[str, Any], in_c: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_c:
        monkeypatch.setattr(standing, "LOADER", yaml.BaseLoader)
    given = {"model": ModelConfig(build={"model_type": "x"}), "train": TrainConfig(updates=1)} | given
    config = Config(data=DataConfig(train="t.jsonl"), pack=PackConfig(examples_per_update=1), **given)
    runfolder.write_text(tmp_path / "config.yaml", compose.to_yaml(config))
    whole = compose.from_run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(compose, "load", None)  # it is not asked
        found = standing.options(tmp_path)
    assert (found.cluster, found.ranks, found.train.updates) == (whole.cluster, whole.ranks, whole.train.updates)
    assert found.watch == whole.watch == config.watch


@pytest.mark.parametrize(
    ("old", "new", "ranks"),
    [
        ("  nodes: 1\n", "", 2),
        ("  tasks_per_node: 2\n", "  tasks_per_node: [2]\n", None),
        ("  tasks_per_node: 2\n", "  tasks_per_node: many\n", None),
        ("cluster: slurm\n", "cluster: large\n", None),
        ("watch:\n", "watch\n", None),
        ("watch:\n", "watch: \0\n", None),
    ],
)
def test_options_that_the_suite_did_not_write_are_told_as_ever(
    run: Path, old: str, new: str, ranks: int | None
) -> None:
    path = run / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    if ranks is not None:
        assert standing.options(run).ranks == compose.from_run(run).ranks == ranks
        return
    with pytest.raises(UserError) as whole:
        compose.from_run(run)
    with pytest.raises(UserError, match=re.escape(str(whole.value))):
        standing.options(run)


COUNT = """
import json, sys
from configs import compose
from configs.console import run
from slurm import status
root, opened, programs = sys.argv[1], [], []
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(root):
        opened.append(arguments[0])
    if event == "subprocess.Popen":
        programs.append(arguments[0])
sys.addaudithook(hook)
compose.load = None
try:
    run(status.app, ["--root", root])
finally:
    print(json.dumps({"opened": len(opened), "most": max(map(opened.count, opened)), "programs": programs}))
"""


def test_of_many_runs_slurm_is_asked_once_and_each_file_is_read_as_it_is_of_one(tmp_path: Path) -> None:
    """Counted as the system sees it. No configuration is composed: that would take 40 ms for each run."""

    def counted(runs: int) -> dict[str, Any]:
        root = tmp_path / str(runs)
        for number in range(runs):
            run = make(root / f"demo-{number}")
            heartbeat.Heartbeat(run, 0, 2).phase("forward", 10)
            report(run, 10)
        done = subprocess.run(
            [sys.executable, "-c", COUNT, str(root)], env={"PATH": ""}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert f"\ndemo-{runs - 1} " in done.stdout
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    one, many = counted(1), counted(40)
    assert many["programs"] == one["programs"] == ["squeue", "sacct"]
    assert many["opened"] == 40 * one["opened"] <= 40 * 12
    assert many["most"] <= 2


def test_element_of_an_array_is_not_the_array() -> None:
    element = {"SLURM_JOB_ID": "70", "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
    assert scheduler.job_id(element) == "70_3"
    assert scheduler.job_id({"SLURM_JOB_ID": "71"}) == "71"


def test_nodes_at_fault_come_with_the_administrators_command(tmp_path: Path) -> None:
    run = make(tmp_path / 'it\'s $(touch x); "a"\nb', nodes=2)
    life.write(run, Life(0, "4711", ("n1", "n2"), "gate", 0, ("n1", "n2")))
    life.write(run, Life(1, "4711", ("n1", "n2"), "died", 3, ("n2",), ("n2",)))
    found = standing.look(run, None, time.time())
    commands = standing.drains(run)
    assert [f"admin    {command}" for command in commands] == [
        line for line in status.page(found).splitlines() if line.startswith("admin")
    ]
    reason = 'died at update 3 of it\'s $(touch x); "a" b'
    assert [shlex.split(command) for command in commands] == [
        ["scontrol", "update", "NodeName=n2", "State=DRAIN", f"Reason={reason}"]
    ]


def test_a_job_is_in_the_queue_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "\n".join(f"{job}|{state}|None" for job, state in (("1", "PENDING"), ("2_0", "RUNNING"), ("3", "FAILED")))
    monkeypatch.setattr(scheduler, "ask", lambda *_, **__: lines)
    found = [scheduler.in_queue(job) for job in ("1", "2_0", "3", "4")]
    assert [state and state.state for state in found] == ["PENDING", "RUNNING", None, None]


def ask(*arguments: str | Path) -> SystemExit:
    with pytest.raises(SystemExit) as ended:
        console.run(status.app, [str(argument) for argument in arguments])
    return ended.value


DAMAGES: tuple[bytes, ...] = (b"", b'{"half', b"\0" * 40, b"\xff\xfe", b"[]", b"[" * 5_000)
FILES = ("attempt", "job", "plan.json", "metrics.jsonl", "result.json", "heartbeat/rank0.json", "heartbeat/watch0.json",
         "logs/rank0.json", "lives/0.json", "hangs/1/verdict.json")  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_run_is_named_and_does_not_hide_the_others(
    run: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "job_states", lambda jobs, patience: ({}, []))
    make(tmp_path / "whole")
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for damage in DAMAGES:
        if name == "metrics.jsonl":
            damage += b"\n"  # a line that has not ended is being written
        path.write_bytes(damage)
        assert ask("--root", tmp_path).code == 1
        told = capsys.readouterr().out
        assert "\nwhole  4711" in told
        assert f"demo-1 cannot be read: {path}" in told
        assert ask(run).code == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {path}")
        assert said.count("\n") == 1
    path.unlink()
    path.mkdir()
    assert ask(run).code == 2
    assert capsys.readouterr().err == f"error: {path}: Is a directory\n"


def test_a_file_among_the_lives_that_is_none(run: Path) -> None:
    (run / "lives").mkdir()
    (run / "lives" / "notes.json").write_text("mine")
    assert standing.lives_of(run) == []


def test_a_run_that_is_removed_meanwhile_is_left_out(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "whole")

    def answer(jobs: object, patience: float) -> tuple[dict[str, JobState], list[str]]:
        shutil.rmtree(run)
        return {}, []

    monkeypatch.setattr(scheduler, "job_states", answer)
    assert ask("--root", tmp_path).code == 0
    told = capsys.readouterr().out
    assert "whole" in told
    assert "demo-1" not in told


def test_a_heartbeat_from_the_future_is_said_to_be_one(run: Path) -> None:
    heartbeat.Heartbeat(run, 0, 2).phase("forward", 1)
    assert "1/2 1000 s ahead of this clock" in status.table([standing.look(run, None, time.time() - 1000)])


def test_a_run_whose_name_is_no_text(tmp_path: Path) -> None:
    make(tmp_path / os.fsdecode(b"demo-\xff"))
    program = [sys.executable, "-m", "slurm.status", "--root", str(tmp_path), "--json"]
    done = subprocess.run(program, capture_output=True, check=False, env=os.environ | {"PATH": ""})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\ndemo-\\udcff  4711" in done.stdout
    (one,) = json.loads(done.stdout.splitlines()[-1])["runs"]
    assert os.fsencode(one["run"]) == bytes(tmp_path / os.fsdecode(b"demo-\xff"))
