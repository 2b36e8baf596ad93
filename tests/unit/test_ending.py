"""How a job ended, as one line, for those who ask later: status and diagnose say what the job said last."""

from __future__ import annotations

import json
import subprocess
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs import compose, runfolder
from configs.errors import UserError
from configs.schema import Config, DataConfig, ModelConfig, PackConfig, SlurmConfig, TrainConfig
from configs.wording import counted
from prefix_train import heartbeat
from slurm import causes, diagnose, ending, finish, life, live, local, policy, scheduler, standing, status
from slurm.finish import Outcome

GATE = "FAIL node3: fail: host.memory: 0.3 GiB are free -> free some (and 1 more)"
CHANGED = "held-out example 3 is gone: data/heldout.jsonl; put it back"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder in its second life, of two ranks."""
    config = Config(
        model=ModelConfig(build={"model_type": "qwen3"}),
        data=DataConfig(train="/train.jsonl"),
        pack=PackConfig(packs_per_update=2),
        train=TrainConfig(updates=3),
        cluster="local",
        slurm=SlurmConfig(tasks_per_node=2),
    )
    runfolder.write_text(tmp_path / runfolder.CONFIG, compose.to_yaml(config))
    runfolder.write_text(tmp_path / runfolder.ATTEMPT, "1\n")
    monkeypatch.setenv("PREFIX_TRAIN_ATTEMPT", "1")
    return tmp_path


def leave(run: Path, ended: Outcome) -> None:
    ending.write(run, ended.status, ended.cause, ended.line)


def test_a_failed_preflight_is_named_with_its_first_check(run: Path) -> None:
    runfolder.write_text(run / "preflight/1/report.txt", f"{GATE}\nmore\n")
    leave(run, finish.act_failed(run, "gate", 1))
    one = standing.look(run, None, 0.0)
    for said in (status.page(one), status.table([one]), diagnose.diagnose(run).text()):
        assert f"failed: preflight: {GATE}; training did not start" in said
    assert "nothing to explain" not in diagnose.diagnose(run).text()


def test_an_act_that_failed_is_named(run: Path) -> None:
    leave(run, finish.act_failed(run, "plan", 2))
    assert "failed: plan ended with status 2; training did not start" in diagnose.diagnose(run).text()
    assert "failed: plan ended with status 2" in status.page(standing.look(run, None, 0.0))


def test_without_a_word_of_the_end_there_is_nothing_to_say(run: Path) -> None:
    """As it was for every job of one machine."""
    assert "nothing to explain yet" in diagnose.diagnose(run).text()
    assert "end  " not in status.page(standing.look(run, None, 0.0))


def test_an_earlier_life_and_a_good_end_say_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(run, Outcome(runfolder.STOPPED, "stopped as asked", "stopped"))
    assert ending.bad(run, 1) is None
    leave(run, Outcome(1, "failed", "raised"))
    assert ending.bad(run, 1) is not None
    assert ending.bad(run, 2) is None
    runfolder.write_text(run / runfolder.ATTEMPT, "2\n")
    assert "nothing to explain yet" in diagnose.diagnose(run).text()


def test_a_process_of_an_earlier_life_leaves_no_word(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runfolder.write_text(run / runfolder.ATTEMPT, "2\n")
    leave(run, Outcome(1, "failed: late", "raised"))
    assert not (run / runfolder.END).exists()
    assert "end.json cannot be written: attempt 1 may not write" in capsys.readouterr().err


def fail_in_setup(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job ends before it has begun a life."""
    monkeypatch.delenv(life.VARIABLE)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr(finish.scheduler, "outlive_requeue", lambda: None)
    assert finish.main(run, "setup line 1:7") == 7


def test_the_word_of_a_job_that_never_began_is_not_the_next_lifes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of slurm.setup fails in the first submission, is mended, and the run is submitted again."""
    (run / runfolder.ATTEMPT).unlink()
    fail_in_setup(run, monkeypatch)
    assert "failed: setup line 1 ended with status 7" in status.page(standing.look(run, None, 0.0))
    assert life.begin_next(run) == 0
    assert "nothing to explain yet" in diagnose.diagnose(run).text()
    assert "end  " not in status.page(standing.look(run, None, 0.0))


def test_a_setup_line_that_fails_after_the_first_life_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_in_setup(run, monkeypatch)
    said = "failed: setup line 1 ended with status 7; training did not start"
    assert capsys.readouterr().err == said + "\n"
    assert ending.bad(run, 1) == ending.Ending(1, 7, "setup", said)
    assert said in diagnose.diagnose(run).text()


def test_damage_is_named(run: Path) -> None:
    (run / runfolder.END).write_text("{")
    with pytest.raises(runfolder.Damaged, match=r"end\.json is damaged"):
        standing.look(run, None, 0.0)


def mistake(run: Path, ranks: int = 2, message: str = CHANGED) -> None:
    """All ranks end with a mistake that they have agreed on."""
    for rank in range(ranks):
        heartbeat.Heartbeat(run, rank, ranks).phase("evaluate", 2)
        try:
            raise UserError(message)
        except UserError as error:
            heartbeat.ended(run, rank, ranks, error=error)


def test_a_result_that_was_refused_is_no_completion(run: Path) -> None:
    """As where a metric of the user's own raises: what was found is kept, and the job ends with status 2."""
    runfolder.write_json(run / runfolder.RESULT, {"heldout_loss": 0.5})
    leave(run, Outcome(2, f"error: {CHANGED}", "mistake"))
    assert standing.look(run, None, 0.0).end == f"error: {CHANGED}"
    leave(run, Outcome(0, "complete", "complete"))
    assert standing.look(run, None, 0.0).end == "complete, heldout loss 0.5"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_mistake_within_a_rank_is_one_line(run: Path, ranks: int) -> None:
    mistake(run, ranks)
    found = finish.conclude(run, 0)
    assert (found.status, found.cause, found.ranks) == (2, "mistake", ())
    assert found.line == f"error: {CHANGED}"
    leave(run, found)
    told = diagnose.diagnose(run).text()
    assert told.startswith(f"error: {CHANGED}.")
    assert "traceback" not in told
    assert "UserError" not in told
    assert f"python -m slurm.submit {run}" in told
    assert f"error: {CHANGED}" in status.table([standing.look(run, None, 0.0)])


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (1, "failed: rank 1 left no word of how it ended"),
        (2, "failed: all ranks ended well, but there is no result.json"),
    ],
)
def test_a_life_whose_ranks_ended_well_and_that_failed_is_explained(run: Path, ranks: int, said: str) -> None:
    for rank in range(ranks):
        heartbeat.ended(run, rank, 2)
    assert f"{counted(ranks, 'rank')} of life 1 ended well" in diagnose.diagnose(run).text()
    leave(run, finish.conclude(run, 0))
    assert diagnose.diagnose(run).text() == said + "\n"


def test_a_long_mistake_is_told_whole(run: Path) -> None:
    message = "x" * 150 + " expected " + "y" * 150 + ", found z; build it again"
    mistake(run, message=message)
    assert diagnose.diagnose(run).text().startswith(f"error: {message}.")


def test_an_exit_with_status_two_and_an_exception_are_no_mistakes(run: Path) -> None:
    for error in (SystemExit(2), ValueError("odd")):
        heartbeat.ended(run, 0, 1, error=error)
        (end,) = heartbeat.read_ends(run)
        assert causes.mistake(end) is None
        assert finish.conclude(run, 0).line.startswith("failed: rank 0 on ")


def test_the_line_of_a_mistake_is_shown_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank's log has it, and the job says it last; another line that begins like one is shown."""

    class Ranks:
        """Of submitit: they have left their log, and ended."""

        _process = subprocess.Popen(["true"])

        def __init__(self, *_: object) -> None: ...

        def update_parameters(self, **_: object) -> None: ...

        def submit(self, *_: object) -> Ranks:
            self._process.wait()
            log = f"begins: 3 updates\nerror: of a library\nupdate 1/3  loss 1.0\nerror: {CHANGED}\n"
            runfolder.write_text(run / "logs/rank0.log", log)
            return self

        def done(self) -> bool:
            return True

    stream = StringIO()
    monkeypatch.setattr("submitit.LocalExecutor", Ranks)
    monkeypatch.setattr(local, "Asked", lambda _: SimpleNamespace(number=0))
    monkeypatch.setattr(local.acts, "command", lambda *_: ("true",))
    monkeypatch.setattr(local, "Live", lambda *given: live.Live(*given, stream))
    mistake(run)
    assert local._train_in_ranks(compose.from_run(run), run).line == f"error: {CHANGED}"
    assert stream.getvalue() == "begins: 3 updates\nupdate 1/3  loss 1.0\nerror: of a library\n"


def test_a_local_job_leaves_its_last_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "run_job", lambda run: Outcome(78, "failed: preflight: x", "gate"))
    assert local.main(run) == 78
    assert json.loads((run / runfolder.END).read_text()) == {
        "attempt": 1, "status": 78, "cause": "gate", "line": "failed: preflight: x"
    }  # fmt: skip


@pytest.mark.parametrize("refused", [True, False])
def test_a_job_that_could_not_begin_again_says_so_later_too(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refused: bool
) -> None:
    def requeue(*_: object) -> None:
        if refused:
            raise scheduler.NoAnswer("scontrol: Job is on hold")

    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setattr(scheduler, "outlive_requeue", lambda: None)
    monkeypatch.setattr(scheduler, "requeue", requeue)
    life.write(run, policy.Life(1, "17", ("node1",)))
    monkeypatch.setattr(finish, "conclude", lambda *_: Outcome(134, "failed: rank 0 was ended", "network"))
    assert finish.main(run, "0") == 134
    printed = capsys.readouterr().err
    bad = ending.bad(run, 1)
    assert bad is not None
    assert (bad.status, bad.cause) == (134, "network")
    assert bad.line.startswith("failed: rank 0 was ended; ")
    assert "; begins again " in printed
    assert ("; begins again " in bad.line) is not refused
    told = "could not begin again: scontrol: Job is on hold; to go on: python -m slurm.submit "
    assert (f"; {told}" in bad.line) is (told in printed) is refused


def test_a_slurm_job_leaves_its_last_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finish.scheduler, "outlive_requeue", lambda: None)
    monkeypatch.setattr(finish, "_end", lambda run, outcome: (Outcome(2, "error: x", "mistake"), None))
    assert finish.main(run, "2") == 2
    assert "error: x" in status.page(standing.look(run, None, 0.0))
