"""A whole run through `train.main`: stopped and gone on, on other numbers of ranks, and what its result says."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from configs import compose, runfolder
from configs.errors import UserError
from configs.schema import (
    AdapterConfig,
    Config,
    DataConfig,
    EvaluateConfig,
    MemoryConfig,
    ModelConfig,
    PackConfig,
    TrainConfig,
    VerifyConfig,
)
from prefix_train import budget, checkpoint, heartbeat, outcome, report, tiny, train
from prefix_train.results import page, tables
from tests import additions, lives
from tests.tiny_text import BUILD

UPDATES = 5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chat rows under one instruction, train and held-out; one row of bad.jsonl has no target."""
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("train", 24), ("heldout", 6)):
        additions.write(folder / f"{name}.jsonl", count)
    bad = additions.rows(8)
    del bad[3]["messages"][-1]
    additions.write(folder / "bad.jsonl", bad)
    return folder


def options(data: Path) -> Config:
    return Config(
        name="train",
        cluster="local",
        model=ModelConfig(build=BUILD, dtype="float32"),
        data=DataConfig(train=str(data / "train.jsonl"), heldout=str(data / "heldout.jsonl")),
        pack=PackConfig(max_positions=256, packs_per_update=2),
        adapter=AdapterConfig(rank=4, dropout=0.1, targets=["q_proj", "down_proj"]),
        train=TrainConfig(updates=UPDATES, lr=5e-3, warmup_updates=2, save_every=0),
        evaluate=EvaluateConfig(every=2, max_new_tokens=2, chance=0.25),
        verify=VerifyConfig(examples=3),
    )


def make_run(folder: Path, config: Config) -> Path:
    """A run folder as submit makes it."""
    (folder / runfolder.LOGS).mkdir(parents=True)
    runfolder.write_text(folder / runfolder.CONFIG, compose.to_yaml(config))
    return folder


def live(rank: int, run: Path, ask: int) -> None:
    """A rank's life, its output in logs/. ask: rank 1 gets SIGTERM in its update of this number; 0: nobody does."""
    output = os.open(run / runfolder.LOGS / f"rank{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if ask and rank == 1:
        terminate_in(ask)
    raise SystemExit(train.main(run))


def terminate_in(update: int) -> None:
    original = heartbeat.Heartbeat.phase

    def phase(beats: heartbeat.Heartbeat, name: str, number: int | None = None, pack: int = -1) -> None:
        original(beats, name, number, pack)
        if name == "forward" and number == update:
            os.kill(os.getpid(), signal.SIGTERM)

    heartbeat.Heartbeat.phase = phase  # type: ignore[method-assign]


def run_ranks(run: Path, world: int, attempt: int = 0, ask: int = 0) -> list[int | None]:
    """A life with so many ranks; their exit statuses."""
    runfolder.write_text(run / runfolder.ATTEMPT, str(attempt))
    ranks = lives.start(live, world, run, ask, environment={"PREFIX_TRAIN_ATTEMPT": str(attempt)})
    deadline = time.monotonic() + 120
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
    statuses = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return statuses


def log(run: Path) -> str:
    return (run / runfolder.LOGS / "rank0.txt").read_text()[-3000:]


def computed(run: Path) -> list[dict[str, Any]]:
    """Metrics without times and memory."""
    timed = ("seconds", "positions_per_s", "logical_tokens_per_s", "memory_bytes")
    return [{name: value for name, value in line.items() if name not in timed} for line in report.read_metrics(run)]


def pick(line: dict[str, Any], names: tuple[str, ...]) -> dict[str, float]:
    """Those of the named figures that a line of metrics has."""
    return {name: line[name] for name in names if name in line}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """An undisturbed run of two ranks."""
    run = make_run(tmp_path_factory.mktemp("whole") / "run", options(data))
    assert run_ranks(run, 2) == [0, 0], log(run)
    return run


def test_the_result_says_what_ran(whole: Path, data: Path) -> None:
    result = runfolder.read_json(whole / runfolder.RESULT)
    lines = [line for line in report.read_metrics(whole) if "loss" in line]
    assert (result["updates"], result["ranks"], result["layers"]) == (UPDATES, 2, 2)
    assert result["tensors"] == {"trained": 6, "covered": 6, "without_gradient": []}
    assert result["hash_before"] != result["hash_after"]
    assert result["positions"] == sum(line["positions"] for line in lines) < result["logical_tokens"]
    assert result["heldout_examples"] == 6
    assert 0 <= result["accuracy"] <= 1
    assert result["chance"] == 0.25
    assert result["verify"]["passed"]
    assert result["verify"]["examples"] == 3
    assert result["verify"]["tensors"] == 6
    assert [line["update"] for line in report.read_metrics(whole) if "heldout_loss" in line] == [2, 4, 5]
    base = tiny.build_model(BUILD, 0)
    PeftModel.from_pretrained(base, whole / runfolder.ADAPTER)
    assert log(whole).count("begins: ") == 1
    assert "visible pairs" not in log(whole)  # the plan's figures are told where it is made


def test_its_page_shows_all_of_it(whole: Path) -> None:
    (run,) = page.read([whole])
    assert [line.partition(":")[0] for line in run.missing] == ["plan.json", "code/COMMIT.json", "preflight"]
    counted = {name: cell for name, cell, _ in tables.figures([run]).rows}
    result = runfolder.read_json(whole / runfolder.RESULT)
    assert counted["state"] == f"complete: {UPDATES} of {UPDATES} updates"
    assert counted["positions computed"] == f"{result['positions']:,}"
    assert (counted["sums agree"], counted["weights changed"]) == ("yes", "yes")
    assert (len(run.updates), len(run.heldout)) == (UPDATES, 3)
    text = page.render([run])
    assert "Packs against transformers" in text
    assert text.count("<figure>") == 8  # seven over updates, and the time line


def test_asked_to_stop_a_run_saves_and_goes_on_as_if_never_stopped(tmp_path: Path, whole: Path, data: Path) -> None:
    run = make_run(tmp_path / "run", options(data))
    assert run_ranks(run, 2, 0, ask=2) == [runfolder.STOPPED] * 2, log(run)
    folder = checkpoint.latest(run)
    assert folder is not None
    assert folder.name == "update-000002"
    assert not (run / runfolder.RESULT).exists()
    assert "saved after update 2" in log(run)
    assert run_ranks(run, 2, 1) == [0, 0], log(run)
    assert "resumed after update 2: same ranks" in log(run)
    assert computed(run) == computed(whole)
    mine, theirs = (runfolder.read_json(folder / runfolder.RESULT) for folder in (run, whole))
    for name in ("hash_before", "hash_after", "heldout_loss", "accuracy", "positions"):
        assert mine[name] == theirs[name], name


def test_r14_one_rank_goes_on_where_two_stopped(tmp_path: Path, whole: Path, data: Path) -> None:
    """Dropout off: then the examples' gradients do not depend on how many ranks share them."""
    config = replace(options(data), adapter=AdapterConfig(rank=4, targets=["q_proj", "down_proj"]))
    two, mixed = make_run(tmp_path / "two", config), make_run(tmp_path / "mixed", config)
    assert run_ranks(two, 2) == [0, 0], log(two)
    assert run_ranks(mixed, 2, 0, ask=3) == [runfolder.STOPPED] * 2, log(mixed)
    assert run_ranks(mixed, 1, 1) == [0], log(mixed)
    assert "ranks 2 -> 1: not bit-equal" in log(mixed)
    assert len(computed(mixed)) == len(computed(two))
    for mine, theirs in zip(computed(mixed), computed(two), strict=True):
        same = ("update", "loss", "grad_norm", "heldout_loss", "examples", "targets")
        assert pick(mine, same) == pytest.approx(pick(theirs, same), rel=1e-4)


def test_standalone_trains_the_same_examples_alone(tmp_path: Path, data: Path) -> None:
    """The same examples per update, packed and alone: the same losses."""
    found = []
    for mode in ("shared", "standalone"):
        pack = PackConfig(mode=mode, max_positions=256, examples_per_update=6)  # type: ignore[arg-type]
        adapter = AdapterConfig(rank=4, targets=["q_proj", "down_proj"])
        config = replace(options(data), pack=pack, adapter=adapter, train=TrainConfig(updates=2, save_every=0))
        config = replace(config, verify=VerifyConfig(), evaluate=EvaluateConfig(generate=False))
        run = make_run(tmp_path / mode, config)
        assert run_ranks(run, 1) == [0], log(run)
        found.append(computed(run))
    for packed, alone in zip(*found, strict=True):
        same = ("update", "loss", "grad_norm", "heldout_loss", "examples", "targets", "logical_tokens")
        assert pick(packed, same) == pytest.approx(pick(alone, same), rel=1e-4)
        assert packed.get("positions", 0) <= 0.7 * alone.get("positions", 1)


def here(run: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The only rank, in this process."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    return train.main(run)


def test_a_checkpoint_that_does_not_fit_is_a_mistake_in_one_line(
    tmp_path: Path, whole: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(options(data), adapter=AdapterConfig(rank=2, targets=["q_proj", "down_proj"]))
    run = make_run(tmp_path / "run", config)
    shutil.copytree(whole / runfolder.CHECKPOINTS, run / runfolder.CHECKPOINTS)
    with pytest.raises(UserError, match=r"does not fit this run: .*has shape .*go on with the options"):
        here(run, monkeypatch)
    (found,) = (run / runfolder.CHECKPOINTS).glob("*/model.safetensors")
    found.write_bytes(b"other")
    with pytest.raises(UserError, match=r"has 5 bytes, its manifest says .*move .* away"):
        here(run, monkeypatch)


def test_a_bad_row_stops_or_is_left_out(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(options(data), verify=VerifyConfig(), train=TrainConfig(updates=1))
    config = replace(
        config, data=replace(config.data, train=str(data / "bad.jsonl"), heldout=None), evaluate=EvaluateConfig()
    )
    with pytest.raises(UserError, match=r"bad\.jsonl:4"):
        here(make_run(tmp_path / "stop", config), monkeypatch)
    skipping = replace(config, data=replace(config.data, on_bad_example="skip"))
    run = make_run(tmp_path / "skip", skipping)
    assert here(run, monkeypatch) == 0
    result = runfolder.read_json(run / runfolder.RESULT)
    assert len(result["skipped"]) == 1
    assert "bad.jsonl:4" in result["skipped"][0]
    assert result["examples"] == 7


def test_the_result_says_how_counted_masks_were_made(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(options(data), verify=VerifyConfig(), train=TrainConfig(updates=1), evaluate=EvaluateConfig())
    adapter = replace(config.adapter, masks="counted")
    config = replace(config, data=replace(config.data, heldout=None), adapter=adapter)
    run = make_run(tmp_path / "run", config)
    assert here(run, monkeypatch) == 0
    assert runfolder.read_json(run / runfolder.RESULT)["kernels"]["adapter_masks"] == "written out"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: replace(config, engine="stream"), "engine=stream needs stream.store"),
        (lambda config: replace(config, adapter=AdapterConfig(targets=["q_prj"])), "did you mean q_proj"),
    ],
)
def test_what_is_not_there_is_refused(
    tmp_path: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Config], Config],
    message: str,
) -> None:
    with pytest.raises(UserError, match=message):
        here(make_run(tmp_path / "run", change(options(data))), monkeypatch)


def test_offloaded_inputs_change_nothing_but_the_memory(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, lines = [], []
    for offloaded in ("none", "auto"):
        config = replace(short(data, 2), memory=MemoryConfig(offload=offloaded))
        run = make_run(tmp_path / offloaded, config)
        assert here(run, monkeypatch) == 0
        results.append(runfolder.read_json(run / runfolder.RESULT))
        lines.append([line for line in report.read_metrics(run) if "loss" in line])
    assert results[0]["hash_after"] == results[1]["hash_after"]
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]
    (layers, width, itemsize) = (1, 32, 4)  # of two layers, the first
    for line in lines[1]:
        assert line["offload_bytes"] == 2 * layers * line["positions"] * width * itemsize
        assert line["offload_pinned_bytes"] == layers * budget.PINNED_CHUNK
    assert not any("offload" in name for name in lines[0][0])


def short(data: Path, updates: int) -> Config:
    config = replace(options(data), train=TrainConfig(updates=updates, save_every=0), verify=VerifyConfig())
    return replace(config, evaluate=EvaluateConfig(generate=False))


def test_going_on_with_other_data_is_refused(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same lengths, so that the plan is the same; a file of another name is another option, and said."""
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_bytes((data / f"{name}.jsonl").read_bytes())
    run = make_run(tmp_path / "run", short(tmp_path, 1))
    assert here(run, monkeypatch) == 0
    runfolder.write_text(run / runfolder.CONFIG, compose.to_yaml(short(tmp_path, 2)))
    rows = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(rows.replace("It is 4.", "It is 5."))
    with pytest.raises(UserError, match="update-000001: the data is not what it was"):
        here(run, monkeypatch)
    (tmp_path / "train.jsonl").rename(tmp_path / "other.jsonl")
    config = short(tmp_path, 2)
    config = replace(config, data=replace(config.data, train=str(tmp_path / "other.jsonl")))
    runfolder.write_text(run / runfolder.CONFIG, compose.to_yaml(config))
    assert here(run, monkeypatch) == 0


def test_an_epoch_that_has_become_shorter_is_over(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many updates an epoch: the second epoch's only one is done, the third begins."""
    config = short(data, 3)
    run = make_run(tmp_path / "run", config)
    assert here(run, monkeypatch) == 0
    config = replace(short(data, 5), pack=PackConfig(max_positions=256, packs_per_update=4))
    runfolder.write_text(run / runfolder.CONFIG, compose.to_yaml(config))
    assert here(run, monkeypatch) == 0
    epochs = [line["epoch"] for line in report.read_metrics(run) if "loss" in line]
    assert epochs == [0.5, 1.0, 1.5, 3.0, 4.0]


def test_a_heldout_example_that_is_gone_takes_no_update_with_it(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", short(data, 3))
    with monkeypatch.context() as gone:

        def losses(*_: object) -> dict[int, float]:
            raise UserError("scan.png cannot be read")

        gone.setattr(train.Heldout, "losses", losses)
        with pytest.raises(UserError, match=r"scan\.png"):
            here(run, gone)
    assert [path.name for path in checkpoint.complete(run)] == ["update-000003"]
    assert here(run, monkeypatch) == 0
    assert runfolder.read_json(run / runfolder.RESULT)["heldout_examples"] == 6


def test_a_result_that_cannot_be_trusted_is_no_success(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of itself fails: the result says so and the rank ends with an error."""
    config = replace(options(data), train=TrainConfig(updates=1), verify=VerifyConfig(examples=2, mean_loss=0.0))
    run = make_run(tmp_path / "run", config)
    standalone = outcome.verify.standalone

    def off(*arguments: Any) -> Any:
        half = standalone(*arguments)
        return replace(half, losses={index: loss + 1e-3 for index, loss in half.losses.items()})

    monkeypatch.setattr(outcome.verify, "standalone", off)
    with pytest.raises(outcome.BadOutcome, match="packs differ from standalone examples in mean_loss, example_mean"):
        here(run, monkeypatch)
    assert not runfolder.read_json(run / runfolder.RESULT)["verify"]["passed"]


def test_a_run_that_trained_nothing_is_an_error(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(options(data), verify=VerifyConfig(), train=TrainConfig(updates=1))
    monkeypatch.setattr(train.torch.optim.AdamW, "step", lambda *_: None)
    with pytest.raises(outcome.BadOutcome, match="all 6 trained tensors are to the bit what they were"):
        here(make_run(tmp_path / "run", config), monkeypatch)
