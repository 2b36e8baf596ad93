"""python -m slurm.diagnose on run folders: of a hang, of ranks that died, of nothing; and the archive of one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs import compose, runfolder
from configs.schema import SlurmConfig
from prefix_train.heartbeat import Beat, End
from slurm import alarms, causes, diagnose, evidence, finish, life, verdict, watch
from slurm.policy import Life
from slurm.watch import Watcher
from tests.hangs import pieces, runs
from tests.hangs.cases import CORPUS, read
from tests.standins import ROOT

TOKEN = "hf_" + "aB3" * 12


def command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PREFIX_TRAIN_ATTEMPT": "0"}
    line = [sys.executable, "-m", "slurm.diagnose", *map(str, arguments)]
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of four ranks on two nodes whose folder has nothing but its config."""
    (tmp_path / "data").mkdir()
    folder = tmp_path / "a run"
    config = runs.options(tmp_path / "data", 4, runs.WATCH, 0, 0)
    config = replace(config, cluster="slurm", slurm=SlurmConfig(nodes=2, tasks_per_node=2))
    for name in (runfolder.LOGS, runfolder.HEARTBEAT):
        (folder / name).mkdir(parents=True)
    runfolder.write_text(folder / runfolder.CONFIG, compose.to_yaml(config))
    return folder


def hang(run: Path, name: str, number: int = 1) -> None:
    """The evidence of a case of the corpus as the run's own."""
    target = run / runfolder.HANGS / str(number)
    shutil.copytree(CORPUS / name / evidence.FOLDER, target / evidence.FOLDER)
    shutil.copy(CORPUS / name / evidence.ALARM, target / evidence.ALARM)


def leave(run: Path, *words: Beat | End) -> None:
    for one in words:
        folder = runfolder.HEARTBEAT if isinstance(one, Beat) else runfolder.LOGS
        runfolder.write_json(run / folder / f"rank{one.rank}.json", asdict(one))


def test_a_hang_from_the_folder_alone(run: Path, tmp_path: Path) -> None:
    hang(run, "missing-sleep-optimizer")
    done = command(run, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    *text, last = done.stdout.splitlines()
    expected = read(CORPUS / "missing-sleep-optimizer").judge()
    assert text[0] == expected.sentence
    assert text[1].startswith("next: ")
    document = json.loads(last)
    assert (document["hang"], document["verdict"]["kind"], document["verdict"]["ranks"]) == (1, "missing_rank", [3])
    assert document["verdict"]["nodes"] == ["node2"]


def test_of_several_hangs_the_one_that_names_a_rank_or_the_one_that_is_asked_for(run: Path) -> None:
    hang(run, "unknown-node")
    hang(run, "missing-sleep-optimizer", 2)
    assert diagnose.diagnose(run).hang == 2
    first = diagnose.diagnose(run, 1)
    assert first.verdict is not None
    assert first.verdict.kind == "unknown"
    assert first.text().startswith("cannot tell: ranks 2 and 3 on ? gave nothing")
    life.write(run, Life(0, "7", ("node1", "node2")))
    assert diagnose.diagnose(run, 1).text().startswith("cannot tell: ranks 2 and 3 on node2 gave nothing")


def test_r33_ranks_that_died_without_a_hang_are_explained_by_their_own_words(run: Path) -> None:
    lost = "Connection closed by peer [10.0.0.1]:4242"
    leave(
        run,
        *(pieces.beat(number, 4, f"node{number // 2 + 1}") for number in range(4)),
        pieces.end(1, exception="ValueError", message="row 17: corrupt image", where="/x/data.py:88", status=1),
        *(pieces.end(n, 4, "node2", pieces.NOW - 1, exception="RuntimeError", message=lost, status=1) for n in (2, 3)),
    )  # fmt: skip
    found = diagnose.diagnose(run)
    assert found.hang is None
    assert found.verdict is not None
    assert (found.verdict.kind, found.verdict.ranks) == ("rank_raised", (1,))
    assert found.text().startswith(
        "rank 1 on node1 raised ValueError in update 7 at data.py:88: row 17: corrupt image."
    )
    assert "rank 0: it left no word of how it ended" in found.text()


def test_a_rank_aborted_by_sizes_is_explained_by_the_rings_that_the_watchers_kept(run: Path) -> None:
    case = read(CORPUS / "size-sum")
    for node in case.nodes:
        evidence.write(evidence.of_end(run, 0), node, run)
        leave(run, *(rank.end for rank in node.ranks if rank.end))
    found = diagnose.diagnose(run)
    assert found.verdict is not None
    assert (found.verdict.kind, found.verdict.ranks) == ("size_mismatch", (1,))


@pytest.mark.parametrize("name", ["size-sum", "size-sum-first", "extra-sum"])
def test_the_jobs_last_line_says_what_the_rings_say(run: Path, name: str) -> None:
    case = read(CORPUS / name)
    expected = case.judge()
    ends = [rank.end for node in case.nodes for rank in node.ranks if rank.end]
    bad = min((end for end in ends if end.status != 0), key=causes.order)
    leave(run, *ends)
    alone = finish.conclude(run, 143)
    for node in case.nodes:
        evidence.write(evidence.of_end(run, 0), node, run)
    found = finish.conclude(run, 143)
    told = diagnose.of_life(run, 0)
    assert told is not None
    assert (told.kind, told.ranks) == (expected.kind, expected.ranks)
    assert found.line == f"{alone.line}; {told.sentence}"
    assert found.line.startswith(f"failed: rank {bad.rank} on {bad.host} was ended by SIGABRT")
    assert (found.ranks, found.cause, found.status) == (expected.ranks, "died", alone.status)
    damaged = next((evidence.of_end(run, 0) / evidence.FOLDER).glob("*"))
    damaged.write_text("{")
    assert finish.conclude(run, 143).line.startswith(f"{alone.line}; what its watchers saw cannot be read: {damaged}")


def waited_s(run: Path, nodes: int = 1) -> float:
    """By a clock that goes on where something waits, and nowhere else."""
    slept = [0.0]
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "time", clock)
        finish.wait_for_words(run, 3.0, nodes)
    return sum(slept)


def test_only_after_an_abort_what_the_watchers_saw_is_waited_for(run: Path) -> None:
    leave(run, *(pieces.end(number, 4, "node1", signal="SIGKILL", status=None) for number in range(4)))
    assert waited_s(run) == 0
    leave(run, pieces.end(2, 4, "node1", signal="SIGABRT", status=None))
    assert waited_s(run) == pytest.approx(3.0, abs=0.11)
    evidence.write(evidence.of_end(run, 0), pieces.node("node1", []), run)
    assert waited_s(run) == 0
    assert waited_s(run, nodes=2) == pytest.approx(3.0, abs=0.11)


def live_and_die(tmp_path: Path, fault: str, culprit: int, world: int) -> tuple[Path, int]:
    """A real run with a planted fault beside the real watcher; its folder, and the watcher's exit status."""
    options = replace(runs.WATCH, poll_s=0.2, sample_gap_s=1.0)
    (tmp_path / "data").mkdir()
    config = runs.options(tmp_path / "data", world, options, 0, 0)
    with runs.running(tmp_path / "run", config, {culprit: fault}, world) as ranks:
        watcher = Watcher(tmp_path / "run", options, range(world), attempt=0)
        deadline = time.monotonic() + 90
        while (status := watcher.poll()) is None:
            assert time.monotonic() < deadline, ranks.logs()
            ranks.ends()  # their parent writes how they ended
            time.sleep(options.poll_s)
    return tmp_path / "run", status


@pytest.mark.slow
def test_a_real_abort_is_a_size_mismatch_and_its_rank_the_one_that_was_different(tmp_path: Path) -> None:
    run, status = live_and_die(tmp_path, "other size", 2, 3)
    found = diagnose.diagnose(run)
    assert status == watch.RANK_ENDED
    assert found.verdict is not None
    assert (found.verdict.kind, found.verdict.ranks) == ("size_mismatch", (2,)), found.text()


@pytest.mark.slow
def test_a_real_abort_fails_without_the_rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the ranks' words alone the one that gloo aborted is named, which need not be the one at fault."""
    monkeypatch.setattr(Watcher, "_see_end", lambda watcher, gap_s: None)
    run, _ = live_and_die(tmp_path, "other size", 2, 3)
    found = diagnose.diagnose(run)
    assert found.verdict is not None
    assert found.verdict.kind != "size_mismatch"


@pytest.mark.slow
def test_r33_of_a_real_run_others_wait_for_the_rank_that_raised(tmp_path: Path) -> None:
    run, status = live_and_die(tmp_path, "raise and wait", 1, 3)
    found = diagnose.diagnose(run)
    assert status == watch.HUNG
    assert found.verdict is not None
    assert (found.verdict.kind, found.verdict.ranks) == ("rank_raised", (1,)), found.text()
    assert "2 ranks wait in all_gather (step.py:" in found.verdict.sentence


def test_nothing_to_explain(run: Path, tmp_path: Path) -> None:
    assert "no rank has given a heartbeat" in command(run, cwd=tmp_path).stdout
    leave(run, pieces.beat(0, 4, "node1"))
    assert "--now looks at the ranks of a run that is alive" in command(run, cwd=tmp_path).stdout
    leave(run, *(pieces.end(number, 4, "node1", status=0) for number in range(4)))
    assert "4 ranks of life 0 ended well" in command(run, cwd=tmp_path).stdout


def test_mistakes_are_one_line_and_status_2(run: Path, tmp_path: Path) -> None:
    hang(run, "unknown-node")
    for arguments, words in (
        ((tmp_path,), "is not a run folder"),
        ((run, "--hang", "7"), "has no hang 7: there is 1"),
        ((run, "--hang", "1", "--now"), "give one of them"),
    ):
        done = command(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
    (run / "hangs" / "1" / "evidence" / "0-node1.json").write_text("[")
    done = command(run, cwd=tmp_path)
    assert done.returncode == 2
    assert "0-node1.json" in done.stderr


def test_the_archive_says_the_same_elsewhere_and_has_no_secrets(run: Path, tmp_path: Path) -> None:
    hang(run, "missing-sleep-optimizer")
    (run / "logs" / "rank0.log").write_text(f"export HF_TOKEN={TOKEN}\nrank 0 says hello\n")
    (run / "checkpoints" / "update-000006").mkdir(parents=True)
    (run / "checkpoints" / "update-000006" / "model.safetensors").write_text("weights")
    packed = tmp_path / "for a colleague.tar.gz"
    done = command(run, "--archive", packed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"files in {packed}" in done.stdout
    elsewhere = tmp_path / "elsewhere"
    with tarfile.open(packed) as tar:
        for member in tar:
            target = elsewhere / member.name
            assert member.isfile()
            assert target.resolve().is_relative_to(elsewhere)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]
    assert not (elsewhere / run.name / "checkpoints").exists()
    assert (elsewhere / run.name / "logs" / "rank0.log").read_text() == "export HF_TOKEN=***\nrank 0 says hello\n"
    again = command(elsewhere / run.name, cwd=tmp_path)
    assert again.stdout.splitlines()[0] == done.stdout.splitlines()[0]
    assert (elsewhere / run.name / "diagnosis.txt").read_text() in done.stdout


def test_a_verdict_of_a_life_before_is_not_that_of_the_present_one(run: Path) -> None:
    hang(run, "missing-sleep-optimizer")
    runfolder.write_text(run / runfolder.ATTEMPT, "1\n")
    assert diagnose.diagnose(run).verdict is None
    assert diagnose.diagnose(run, 1).verdict is not None
    assert verdict.latest(run, 1) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hangs/1/verdict.json", "[]"),
        ("hangs/1/verdict.json", "{}"),
        ("attempt", "junk"),
        ("heartbeat/rank0.json", "{"),
    ],
)
def test_a_damaged_file_is_named(run: Path, tmp_path: Path, name: str, text: str) -> None:
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text(text)
    done = command(".", cwd=run)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert str(run / name) in done.stderr


def test_links_are_not_read(run: Path, tmp_path: Path) -> None:
    hang(run, "unknown-node")
    (run / "hangs").rename(tmp_path / "hangs")
    (run / "hangs").mkdir()
    (run / "hangs" / "1").symlink_to(tmp_path / "hangs" / "1")
    done = command(run, cwd=tmp_path)
    assert (done.returncode, "hangs/1 is a link" in done.stderr) == (2, True), done.stderr


def test_nobody_is_asked_where_no_rank_runs(run: Path, tmp_path: Path) -> None:
    assert "no rank has given a heartbeat" in command(run, "--now", cwd=tmp_path).stderr
    leave(run, *(pieces.beat(n, 4, "node1") for n in range(4)), *(pieces.end(n, 4, "n", status=0) for n in range(4)))
    assert "all ranks of life 0 have ended" in command(run, "--now", cwd=tmp_path).stderr
    (run / "result.json").write_text("{}")
    assert "is complete" in command(run, "--now", cwd=tmp_path).stderr
    assert not (run / "hangs").exists()


@pytest.mark.parametrize("age_s", [1.0, 1000.0])
def test_a_question_that_nobody_waits_for_does_not_block_the_next(run: Path, age_s: float) -> None:
    asked = evidence.Alarm(0, "", -1, 0.0, 0.0, "somebody asked", time.time() - age_s)
    assert alarms.raise_one(run, asked, inside=False) is not None
    assert (alarms.raise_one(run, asked, inside=False) is None) == (age_s < alarms.ANSWER_S)
