"""Experiment trackers: names, what is missing, what fails when, and that no secret leaves; real ones if installed."""

from __future__ import annotations

import io
import json
import math
import re
import secrets
import threading
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import tracking
from accelerate.tracking import GeneralTracker
from torch.utils.tensorboard import SummaryWriter

from configs import redact, rules, runfolder, tracker_names
from configs.errors import UserError
from configs.schema import Config, DataConfig, ModelConfig, PackConfig, ReportConfig, SlurmConfig, TrainConfig
from prefix_train import report, trackers
from slurm import submit
from tests.documents import ROOT
from tests.unit.test_report import update

KEY = "0123456789abcdef" * 2 + "01234567"
"""As W&B's keys look."""


def config(*names: str, **options: Any) -> Config:
    return Config(
        name="demo",
        data=DataConfig(train="t.jsonl"),
        model=ModelConfig(build={"model_type": "x"}),
        pack=PackConfig(packs_per_update=2),
        train=TrainConfig(updates=5),
        slurm=SlurmConfig(setup=[f"export WANDB_API_KEY={KEY}"]),
        report=ReportConfig(trackers=list(names), **options),
    )


class Noted(GeneralTracker):
    """A tracker that keeps what it is told; it stands in for `wandb`."""

    name = "wandb"
    requires_logging_directory = False
    main_process_only = False
    made: list[Noted] = []  # noqa: RUF012

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__()
        self.project, self.options, self.threads = project, options, {threading.current_thread().name}
        self.configuration: dict[str, Any] | None = None
        self.lines: list[tuple[int | None, dict[str, float]]] = []
        self.finished = False
        self.made.append(self)

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        tracking.logger.debug("needs Accelerate's state")
        self.configuration = values

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.lines.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> type[Noted]:
    """A class of its own, for a test to change, known as `wandb` and installed."""
    kind = type("Noted", (Noted,), {"made": []})
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "wandb", kind)
    monkeypatch.setattr(tracker_names, "find_spec", lambda name: ModuleSpec(name, None, origin="installed"))
    return kind


def reporter(run: Path, told: Config, resumed: int = 0, stream: io.StringIO | None = None) -> report.Reporter:
    run.mkdir(exist_ok=True)
    return report.Reporter(run, 0, 5, resumed, told, stream or io.StringIO())


def standing(run: Path, name: str = "wandb") -> dict[str, Any]:
    found: dict[str, Any] = runfolder.read_json(run / runfolder.TRACKERS)[name]
    return found


def test_the_names_are_accelerates() -> None:
    assert set(tracker_names.PACKAGES) == set(tracking.LOGGER_TYPE_TO_CLASS)


def test_a_tracker_is_told_every_line_and_no_secret(tmp_path: Path, noted: type[Noted]) -> None:
    threads = torch.get_num_threads()
    with reporter(tmp_path / "run-1", config("wandb", "tensorboard", "wandb", project="digits")) as told:
        told.updated(update(1))
        told.evaluated(1, {"loss": 0.25})
        done = told.finish()
    (made,) = noted.made
    assert made.project == "digits"
    assert (made.options["id"], made.options["resume"], made.options["dir"]) == (
        "run-1",
        "allow",
        str(tmp_path / "run-1" / "logs"),
    )
    assert made.configuration is not None
    assert made.configuration["train.updates"] == 5
    assert KEY not in str(made.configuration)
    assert [(step, values.get("loss"), values.get("heldout_loss")) for step, values in made.lines] == [
        (1, 1.0, None),
        (1, None, 0.25),
    ]
    assert made.finished
    assert made.threads == {"tracker wandb"}, "training itself never calls it"
    assert done["trackers"] == {"wandb": {"id": "run-1", "taken": 2, "failed": 0, "error": ""}}
    assert torch.get_num_threads() == threads


def test_a_later_life_goes_on_with_the_same_run(tmp_path: Path, noted: type[Noted]) -> None:
    run = tmp_path / "run"
    with reporter(run, config("wandb")) as told:
        told.updated(update(1))
    with reporter(run, config("wandb"), resumed=1) as told:
        told.updated(update(2))
    first, second = noted.made
    assert first.options["id"] == second.options["id"] == "run"
    assert second.configuration is None, "said once"
    assert standing(run)["taken"] == 2, "over all lives"


def broken(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def test_what_cannot_start_ends_a_run_only_before_its_first_update(
    tmp_path: Path, noted: type[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stream = tmp_path / "run", io.StringIO()
    monkeypatch.setattr(noted, "start", broken(RuntimeError(f"api_key={KEY} is\n not known")))
    with pytest.raises(UserError, match="wandb cannot be started: RuntimeError: api_key=") as caught:
        reporter(run, config("wandb"))
    assert KEY not in str(caught.value)
    (run / runfolder.METRICS).write_text(json.dumps({"update": 1, "loss": 1.0}) + "\n")
    with reporter(run, config("wandb"), resumed=1, stream=stream) as told:
        told.updated(update(2))
    assert "the run goes on without it" in stream.getvalue()
    assert standing(run)["failed"] == 1
    assert [line["update"] for line in report.read_metrics(run)] == [1, 2]


def test_what_fails_later_is_counted_and_the_run_goes_on(
    tmp_path: Path, noted: type[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    with reporter(tmp_path / "run", config("wandb"), stream=stream) as told:
        told.updated(update(1))
        monkeypatch.setattr(noted, "log", broken(ConnectionError(f"https://me:{KEY}@host said 503")))
        for number in (2, 3):
            told.updated(update(number))
        done = told.finish()
    found = done["trackers"]["wandb"]
    assert (found["taken"] + found["failed"], found["failed"] >= 2) == (3, True)
    assert found["error"].startswith("ConnectionError: ")
    assert KEY not in json.dumps(found) + stream.getvalue()
    assert stream.getvalue().count("wandb did not take a line") == 1
    assert [line["update"] for line in report.read_metrics(tmp_path / "run")] == [1, 2, 3]


def test_where_the_end_cannot_be_written_all_is_closed_and_the_first_error_stays(
    tmp_path: Path, noted: type[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, closed = tmp_path / "run", list[str]()
    monkeypatch.setattr(SummaryWriter, "close", lambda _: closed.append("board"))
    monkeypatch.setattr(report._Lines, "close", lambda _: closed.append("progress"))
    told = reporter(run, config("wandb"))
    (run / runfolder.ATTEMPT).write_text("1\n")  # this process is of a life that is over
    with pytest.raises(ValueError, match="what went wrong") as caught, told:
        raise ValueError("what went wrong")
    assert closed == ["progress", "board"]
    assert noted.made[0].finished
    assert any("closing the reports then failed too: attempt 0 may not" in note for note in caught.value.__notes__)


def test_without_another_error_that_of_closing_is_said(tmp_path: Path, noted: type[Noted]) -> None:
    run = tmp_path / "run"
    with pytest.raises(runfolder.StaleAttempt), reporter(run, config("wandb")):
        (run / runfolder.ATTEMPT).write_text("1\n")


def test_a_life_that_is_over_leaves_no_tracker_running(tmp_path: Path, noted: type[Noted]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / runfolder.ATTEMPT).write_text("1\n")
    with pytest.raises(runfolder.StaleAttempt):
        trackers.Trackers(run, config("wandb"), True, print)
    assert noted.made[0].finished


def test_training_never_waits_for_a_tracker(
    tmp_path: Path, noted: type[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(noted, "log", lambda *_, **__: let_go.wait(60))
    monkeypatch.setattr(trackers, "MOST_WAITING", 2)
    began = time.monotonic()
    found = trackers.Trackers(tmp_path, config("wandb"), False, lambda text: None)
    for step in range(1, 7):
        found.log({"loss": 1.0}, step)
    lost = found.close(0.2)["wandb"]
    assert time.monotonic() - began < 20
    assert (lost["taken"], lost["failed"]) == (0, 6), "those that found no room, and those that were still waiting"
    let_go.set()


def test_without_waiting_for_the_rest_lines_are_lost_and_none_is_counted(tmp_path: Path, noted: type[Noted]) -> None:
    """What the test above relies on: a tracker that takes its time is given it."""
    noted.log = lambda self, values, step=None, **_: time.sleep(0.05)  # type: ignore[method-assign]
    found = trackers.Trackers(tmp_path, config("wandb"), False, lambda text: None)
    for step in range(1, 5):
        found.log({"loss": 1.0}, step)
    assert found.close(30)["wandb"] == {"id": tmp_path.name, "taken": 4, "failed": 0, "error": ""}


@pytest.mark.parametrize(
    ("report_options", "words"),
    [
        ({"trackers": ["wandbb"]}, "report.trackers: 'wandbb' is unknown; did you mean wandb"),
        ({"trackers": ["aim"], "offline": True}, "report.offline: aim knows no such mode here"),
        ({"project": "it's"}, 'report.project is "it\'s": give up to 100 letters'),
        ({"run_name": "a/b"}, "report.run_name is 'a/b'"),
    ],
)
def test_wrong_options(report_options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        rules.check(replace(config(), report=ReportConfig(**report_options)), "x.yaml")
    assert str(caught.value).startswith(f"x.yaml: {words}")


def test_a_missing_package_is_named_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_names, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="the package of comet_ml is not installed: pip install comet-ml"):
        tracker_names.require(["comet_ml"])
    with pytest.raises(
        UserError, match=r"of wandb is not installed: pip install --editable '\.\[trackers\]', or leave"
    ):
        reporter(tmp_path / "run", config("wandb"))


def test_trackers_of_the_extra_are_installed_by_it() -> None:
    """As the guide says, in the versions that are tested; the guide and the error say the same."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["trackers"]
    assert [re.split("[->]", one)[0] for one in extras] == list(tracker_names.TESTED)
    guide = (ROOT / "docs/guides/trackers.md").read_text()
    for name in tracker_names.PACKAGES:
        assert (tracker_names.installed_by(name) in guide) == (name in tracker_names.TESTED)


def test_a_plain_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "comet_ml" / "offline-run-1").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert tracker_names.find_spec("comet_ml") is not None, "what looks like one"
    with pytest.raises(UserError, match="the package of comet_ml is not installed: pip install comet-ml"):
        tracker_names.require(["comet_ml"])
    (tmp_path / "comet_ml" / "__init__.py").touch()
    tracker_names.require(["comet_ml"])


def test_submitting_refuses_a_missing_package_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").touch()
    assert tracker_names.find_spec("aim") is None
    with pytest.raises(UserError, match="the package of aim is not installed: pip install aim"):
        submit.resolve(config("aim"), tmp_path)


def test_keys_of_trackers_are_secrets() -> None:
    for name in ("WANDB_API_KEY", "COMET_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN"):
        assert redact.is_secret(name), name
        assert "abc123" not in redact.redact(f"export {name}=abc123")


def installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def test_mlflow_itself_gets_two_lives_as_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")  # as it is, and is put back
    mlflow = pytest.importorskip("mlflow")
    run, told_of = tmp_path / "run", config("mlflow", offline=True, project="my digits")
    before = mlflow.get_tracking_uri()
    try:
        with reporter(run, told_of) as told:
            told.updated(update(1))
        with reporter(run, told_of, resumed=1) as told:
            told.updated(update(2, loss=0.5))
            done = told.finish()
        client = mlflow.MlflowClient((run / "logs" / "mlflow").as_uri())
        (experiment,) = [one for one in client.search_experiments() if one.name == "my digits"]
        (found,) = client.search_runs([experiment.experiment_id])
        losses = [(one.step, one.value) for one in client.get_metric_history(found.info.run_id, "loss")]
    finally:
        mlflow.set_tracking_uri(before)
    assert losses == [(1, 1.0), (2, 0.5)]
    assert done["trackers"]["mlflow"] == {"id": found.info.run_id, "taken": 2, "failed": 0, "error": ""}
    assert found.data.params["train.updates"] == "5"
    assert KEY not in str(found.data.params)
    assert found.info.run_name == "run"
    assert math.isfinite(found.data.metrics["positions_per_s"])


@pytest.mark.skipif(not installed("wandb"), reason="wandb is not installed: pip install wandb")
def test_wandb_itself_writes_into_the_run_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with reporter(run, config("wandb", offline=True)) as told:
        told.updated(update(1))
        done = told.finish()
    assert done["trackers"]["wandb"] == {"id": "run", "taken": 1, "failed": 0, "error": ""}
    (folder,) = (run / "logs" / "wandb").glob("offline-run-*-run")
    (written,) = folder.glob("run-*.wandb")
    assert b"logical_tokens_per_s" in written.read_bytes()
    assert KEY.encode() not in written.read_bytes()


@pytest.mark.skipif(not installed("trackio"), reason="trackio is not installed: pip install trackio")
def test_trackio_itself_gets_two_lives_as_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_SPACE_ID", "nobody/nowhere")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read as the package is imported
    run, told_of = (
        tmp_path / f"run-{secrets.token_hex(4)}",
        config("trackio", offline=True, project="prefix-train test"),
    )
    with reporter(run, told_of) as told:
        told.updated(update(1))
    with reporter(run, told_of, resumed=1) as told:
        told.updated(update(2, loss=0.5))
        done = told.finish()
    assert done["trackers"]["trackio"] == {"id": run.name, "taken": 2, "failed": 0, "error": ""}
    from trackio.sqlite_storage import SQLiteStorage

    found = SQLiteStorage.get_logs("prefix-train test", run.name)
    assert [(line["step"], line["loss"]) for line in found] == [(1, 1.0), (2, 0.5)]
