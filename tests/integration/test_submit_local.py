"""`python -m slurm.submit ... cluster=local` and `debug`: real processes around a stand-in trainer."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs import compose, runfolder
from prefix_train import heartbeat
from tests.standins import make_clone, run_folder, seen, submit, submit_command, wait_for


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return make_clone(tmp_path / "clone")


def assert_frozen(run: Path, rank: int) -> None:
    found = seen(run, rank)
    assert found["train"] == str(run / "code" / "prefix_train" / "train.py")
    assert found["configs"] == str(run / "code" / "configs" / "compose.py")
    assert found["slurm"] == str(run / "code" / "slurm" / "__init__.py")
    assert found["version"] == "original"
    assert found["path"][0] == str(run / "code")


def test_local_run_from_inside_the_clone(clone: Path) -> None:
    done = submit(clone)
    assert done.returncode == 0, done.stderr
    run = run_folder(clone / "runs")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["run", str(run)]
    assert lines[1].startswith("plan    made by the job")
    assert lines[2] == "memory  not known without a plan"
    assert lines[3] == f"follow  tail -F {run}/logs/rank0.log"
    assert "rank 0 of 2 says hello" in lines
    assert "rank 1 of 2 says hello" not in lines
    assert lines[-2] == f"complete: answered exactly 93.0%; {run}/result.json"
    assert json.loads(lines[-1]) == {"accuracy": 0.93, "rank": 0}
    for rank in (0, 1):
        assert_frozen(run, rank)
        environment = seen(run, rank)["environment"]
        assert (environment["RANK"], environment["LOCAL_RANK"], environment["WORLD_SIZE"]) == (
            str(rank),
            str(rank),
            "2",
        )
        assert (environment["OMP_NUM_THREADS"], environment["CUDA_VISIBLE_DEVICES"]) == ("1", "")
        assert environment["PREFIX_TRAIN_ATTEMPT"] == "0"
    assert seen(run, 0)["environment"]["MASTER_PORT"] == seen(run, 1)["environment"]["MASTER_PORT"]
    config = compose.from_run(run)
    assert config.data.train == str(clone / "data" / "train.jsonl")
    assert json.loads((run / "code" / "COMMIT.json").read_text())["source"] == str(clone)
    assert (run / "submitit").stat().st_mode & 0o777 == 0o700


def test_script_from_elsewhere_into_a_hostile_folder(clone: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    (elsewhere / "prefix_train.py").write_text("raise SystemExit('the working folder was imported')")
    (elsewhere / "typer.py").write_text("raise SystemExit('the working folder was imported')")
    root = tmp_path / "größe 'n' \"x\" $(touch pwned)"
    name = 'it\'s "a" $(touch pwned); größe'
    done = submit(clone, f"run_root={root}", f"name={name}", cwd=elsewhere, script=True)
    assert done.returncode == 0, done.stderr
    run = run_folder(root)
    assert compose.from_run(run).name == name
    assert compose.from_run(run).data.train == str(elsewhere / "data" / "train.jsonl")
    for rank in (0, 1):
        assert_frozen(run, rank)
    assert not list(tmp_path.rglob("pwned"))


def test_a_clone_that_changes_after_submission_does_not_matter(clone: Path, tmp_path: Path) -> None:
    gate = tmp_path / "go"
    command, env = submit_command(clone, STANDIN_GATE=str(gate))
    process = subprocess.Popen(command, cwd=clone, env=env, stdout=subprocess.DEVNULL)
    wait_for(lambda: list(clone.glob("runs/*/planned")))
    trainer = clone / "prefix_train" / "train.py"
    trainer.write_text(trainer.read_text().replace("original", "changed"))
    (clone / "slurm" / "job.py").write_text("raise SystemExit('the clone was imported')")
    gate.touch()
    assert process.wait(60) == 0
    assert_frozen(run_folder(clone / "runs"), 0)


def test_without_safe_path_the_clone_would_be_imported(clone: Path) -> None:
    """The trap behind the three tests above: `python -m` puts the working folder before PYTHONPATH."""
    code = clone / "frozen"
    (code / "slurm").mkdir(parents=True)
    (code / "slurm" / "__init__.py").write_text("")
    (code / "slurm" / "where.py").write_text("print(__file__)")
    (clone / "slurm" / "where.py").write_text("print(__file__)")
    shown = []
    for safe in ({}, {"PYTHONSAFEPATH": "1"}):
        command, env = submit_command(clone, PYTHONPATH=str(code), **safe)
        done = subprocess.run(
            [command[0], "-m", "slurm.where"], cwd=clone, env=env, capture_output=True, text=True, check=True
        )
        shown.append(done.stdout.strip())
    assert shown == [str(clone / "slurm" / "where.py"), str(code / "slurm" / "where.py")]


@pytest.mark.parametrize(
    ("what", "status", "says"),
    [
        ("raise", 1, "raised RuntimeError in update 2 at"),
        ("mistake", 2, "data.train: row 3 is bad"),
        ("kill", 137, "was ended by SIGKILL in update 2"),
        ("five", 5, "ended with status 5"),
        ("forget", 1, "there is no result.json"),
    ],
)
def test_status_is_the_trainings_and_no_rank_is_left(clone: Path, what: str, status: int, says: str) -> None:
    done = submit(clone, f"model.build.do={what}")
    assert done.returncode == status, done.stdout + done.stderr
    assert says in done.stderr.splitlines()[-1]
    run = run_folder(clone / "runs")
    assert json.loads((run / "end.json").read_text())["line"] == done.stderr.splitlines()[-1]
    if what == "mistake":  # one line for the user, although the rank's log has it too
        assert (done.stdout + done.stderr).count(says) == 1
        assert done.stderr.splitlines()[-1] == f"error: {says}"
    assert not any(psutil.pid_exists(seen(run, rank)["pid"]) for rank in (0, 1))
    if what in ("raise", "kill"):  # rank 0 would have waited two minutes
        assert json.loads((run / "logs" / "rank0.json").read_text())["signal"] == "SIGKILL"


@pytest.mark.parametrize("cluster", ["local", "debug"])
def test_failed_gate_has_its_own_status_and_training_never_starts(clone: Path, cluster: str) -> None:
    done = submit(clone, f"cluster={cluster}", STANDIN_JUDGE_STATUS="1")
    assert done.returncode == 78
    assert "node7: import.torch" in done.stderr.splitlines()[-1]
    assert not (run_folder(clone / "runs") / "seen").exists()


def test_plan_that_fails_ends_the_job_with_its_status(clone: Path) -> None:
    done = submit(clone, STANDIN_PLAN_STATUS="2")
    assert done.returncode == 2
    assert not (run_folder(clone / "runs") / "preflight").exists()


def test_debug_runs_in_process(clone: Path) -> None:
    done = submit(clone, "cluster=debug")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"accuracy": 0.93, "rank": 0}
    assert "rank 0 of 1 says hello" in done.stdout
    assert_frozen(run_folder(clone / "runs"), 0)


def test_debug_shows_the_traceback_and_does_not_wait_in_a_debugger(clone: Path) -> None:
    (clone / "prefix_train" / "train.py").write_text("def main(run):\n    raise ValueError('planted')\n")
    done = submit(clone, "cluster=debug")
    assert done.returncode == 1
    assert "ValueError: planted" in done.stderr
    assert "(Pdb)" not in done.stdout
    run = run_folder(clone / "runs")
    assert json.loads((run / "logs" / "rank0.json").read_text())["exception"] == "ValueError"
    assert "raised ValueError at" in json.loads((run / "end.json").read_text())["line"]


def test_dry_run_writes_nothing(clone: Path) -> None:
    before = sorted(clone.rglob("*"))
    for cluster in ("slurm", "local", "debug"):
        done = submit(clone, f"cluster={cluster}", "--dry-run", "--json", PYTHONDONTWRITEBYTECODE="1")
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout.splitlines()[-1])
        assert document["script"] in done.stdout
        assert document["script"].startswith("#!/bin/bash\n")
    assert sorted(clone.rglob("*")) == before


def test_unknown_key_is_one_line_and_leaves_nothing(clone: Path) -> None:
    done = submit(clone, "trian.updates=3")
    assert done.returncode == 2
    assert done.stderr == "error: argument `trian.updates=3`: unknown key trian.updates; did you mean train.updates?\n"
    assert not (clone / "runs").exists()


@pytest.mark.parametrize("root", ["taken/runs", "/proc/runs"])
def test_folder_that_cannot_be_made_is_one_line(clone: Path, root: str) -> None:
    (clone / "taken").write_text("a file")
    done = submit(clone, f"run_root={root}")
    assert done.returncode == 2
    assert re.fullmatch(r"error: run_root: .*/demo-[^ ]* cannot be made: [^\n]+\n", done.stderr), done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("sweep", [(), ("--sweep", "train.updates=2,3")])
def test_disk_that_is_full_while_the_code_is_frozen(clone: Path, sweep: tuple[str, ...]) -> None:
    """No file may have more than 8 KiB here, which fails in the middle of the copy as a full disk does."""
    command, env = submit_command(clone, "cluster=slurm", *sweep, PYTHONDONTWRITEBYTECODE="1")
    limited = ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", *command]
    done = subprocess.run(limited, cwd=clone, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"error: run_root: .* cannot be made: .*: .*File too large.*\n", done.stderr), done.stderr
    assert list((clone / "runs").iterdir()) == []


def started(clone: Path, *overrides: str, **popen: Any) -> tuple[subprocess.Popen[str], Path, list[int]]:
    """A run under way, its folder, and its ranks' process ids."""
    command, env = submit_command(clone, *overrides)
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=clone, env=env, stdout=pipe, stderr=pipe, text=True, **popen)
    wait_for(lambda: len(list(clone.glob("runs/*/seen/rank*.json"))) == 2)
    run = run_folder(clone / "runs")
    return process, run, [seen(run, rank)["pid"] for rank in (0, 1)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_once_a_run_saves_and_says_how_to_go_on(clone: Path, number: int) -> None:
    """As from a terminal: the whole group gets the signal. The parent ignores SIGINT, as a script's job does."""
    process, run, pids = started(
        clone,
        "model.build.do=slow",
        "train.updates=200",
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    os.killpg(process.pid, number)
    _, told = process.communicate(timeout=40)
    assert process.returncode == runfolder.STOPPED, told
    lines = told.splitlines()
    assert "stopping after this update; Ctrl-C again ends at once" in lines
    assert interrupted(lines[-1], run)
    assert "Traceback" not in told
    assert "Traceback" not in (run / "logs" / "rank0.log").read_text()
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    wait_for(lambda: not session(process.pid))


def interrupted(line: str, run: Path) -> bool:
    """Is `line` that of a run that has saved?"""
    line = re.sub(r"update \d+", "update N", line)
    return line == f"interrupted in update N; saved after update N; to go on: python -m slurm.submit {run}"


def session(leader: int) -> list[psutil.Process]:
    """What is left of the session that `leader` began."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_ctrl_c_typed_into_a_terminal(clone: Path) -> None:
    command, env = submit_command(clone, "model.build.do=slow", "train.updates=200")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=clone,
        env=env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    wait_for(lambda: len(list(clone.glob("runs/*/seen/rank*.json"))) == 2)
    os.write(ours, b"\x03")
    told = b""
    with contextlib.suppress(OSError):  # the terminal is gone when its last process is
        while some := os.read(ours, 65536):
            told += some
    os.close(ours)
    assert process.wait(10) == runfolder.STOPPED, told
    lines = told.decode().splitlines()
    assert "stopping after this update; Ctrl-C again ends at once" in "".join(lines)
    assert interrupted(lines[-1], run_folder(clone / "runs"))
    assert "Traceback" not in told.decode()
    wait_for(lambda: not session(process.pid))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_before_training(clone: Path, tmp_path: Path, number: int) -> None:
    command, env = submit_command(clone, STANDIN_GATE=str(tmp_path / "never"))
    process = subprocess.Popen(
        command,
        cwd=clone,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    wait_for(lambda: list(clone.glob("runs/*/planned")))
    os.killpg(process.pid, number)
    _, told = process.communicate(timeout=30)
    run = run_folder(clone / "runs")
    assert process.returncode == 128 + number
    assert told == f"interrupted before training; nothing is saved yet; to go on: python -m slurm.submit {run}\n"
    wait_for(lambda: not session(process.pid))


def test_debug_saves_when_asked(clone: Path) -> None:
    command, env = submit_command(clone, "cluster=debug", "model.build.do=slow", "train.updates=200")
    process = subprocess.Popen(command, cwd=clone, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: any(beat.phase == "forward" for run in clone.glob("runs/*") for beat in heartbeat.read(run)))
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == runfolder.STOPPED, told
    assert interrupted(told.splitlines()[-1], run_folder(clone / "runs"))
    assert "Traceback" not in told


def wedged(run: Path) -> bool:
    """Are both ranks of the stand-in that is deaf in their second update?"""
    return [beat.update for beat in heartbeat.read(run)] == [2, 2]


def test_asked_twice_a_run_ends_at_once(clone: Path) -> None:
    process, run, pids = started(clone, "model.build.do=deaf", "train.updates=200", start_new_session=True)
    wait_for(lambda: wedged(run))
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=30)
    assert process.returncode == 130
    assert told.splitlines()[-1].startswith("interrupted in update ")
    assert told.splitlines()[-1].endswith(f"nothing is saved yet; to go on: python -m slurm.submit {run}")
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_ranks_that_do_not_save_in_time_are_ended(clone: Path) -> None:
    process, run, pids = started(clone, "model.build.do=deaf", "train.updates=200", "slurm.signal_delay_s=2")
    wait_for(lambda: wedged(run))
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 143
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_killing_the_command_ends_the_ranks(clone: Path) -> None:
    process, _, pids = started(clone, "model.build.do=wait")
    process.kill()
    process.wait(30)
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_submitting_a_run_goes_on_with_it(clone: Path) -> None:
    stopped = submit(clone, "model.build.do=slow", "train.updates=200", "slurm.time=0:00:20", "slurm.signal_delay_s=14")
    assert stopped.returncode == runfolder.STOPPED
    run = run_folder(clone / "runs")
    command, env = submit_command(clone)
    place = next(index for index, word in enumerate(command) if word.endswith(".yaml"))
    again = [*command[:place], str(run)]
    for extra, words in ((["train.lr=1"], "its options are frozen"), ([], "")):
        done = subprocess.run([*again, *extra, "--dry-run"], env=env, cwd=clone, capture_output=True, text=True)
        assert done.returncode == (2 if extra else 0), done.stderr
        assert words in done.stderr
        assert bool(extra) or re.search(r"^resume  saved after update \d+$", done.stdout, re.MULTILINE)
    (run / "config.yaml").write_text(
        (run / "config.yaml").read_text().replace("do: slow", "do: train").replace("0:00:20", "0:10:00")
    )
    done = subprocess.run(again, env=env, cwd=clone, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"accuracy": 0.93, "rank": 0}
    assert seen(run, 1)["environment"]["PREFIX_TRAIN_ATTEMPT"] == "1"
    done = subprocess.run(again, env=env, cwd=clone, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"complete already: {run}/result.json")
    assert json.loads(done.stdout.splitlines()[-1]) == {"accuracy": 0.93, "rank": 0}
    inner = [*command[:place], str(run / "config.yaml")]
    done = subprocess.run(inner, env=env, cwd=clone, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"to go on with it: python -m slurm.submit {run}" in done.stderr


def test_time_limit_is_kept_with_a_warning_first(clone: Path) -> None:
    """submitit's own would be two minutes. The ranks save when they are warned, and the run can go on."""
    limits = ("slurm.time=0:00:20", "slurm.signal_delay_s=14")  # warned after 6 s
    done = submit(clone, "model.build.do=slow", "train.updates=200", *limits)
    assert done.returncode == runfolder.STOPPED, done.stdout + done.stderr
    run = run_folder(clone / "runs")
    assert (
        done.stderr.splitlines()[-1] == f"stopped as asked, with a checkpoint; to go on: python -m slurm.submit {run}"
    )
    assert [end.status for end in heartbeat.read_ends(run)] == [runfolder.STOPPED] * 2


def test_submit_script_starts_another_life(clone: Path) -> None:
    assert submit(clone).returncode == 0
    run = run_folder(clone / "runs")
    _, env = submit_command(clone)
    done = subprocess.run(["bash", run / "submit.sh"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert seen(run, 1)["environment"]["PREFIX_TRAIN_ATTEMPT"] == "1"
    assert done.stdout.count("rank 0 of 2 says hello") == 1
