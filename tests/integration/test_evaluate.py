"""Answers split over ranks, a run's own metrics, and `prefix-train evaluate` in all its forms."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs import compose, runfolder
from configs.errors import UserError
from configs.schema import Config, DataConfig, EvaluateConfig, ModelConfig, PackConfig, TrainConfig
from prefix_train import cli, dist, evaluate, metrics, outcome, review, tiny, train, verify
from prefix_train import model as models
from prefix_train.heldout import Heldout
from prefix_train.render import Renderer
from prefix_train.results import page, scores
from tests import lives
from tests.integration.test_cli import run as command
from tests.tiny_text import BUILD

OWN = """
def length(prediction, example):
    return {"letters": len(prediction), "wanted": len(example["target"])}

def picky(prediction, example):
    if example["meta"]["number"] == 5:
        raise ValueError("five is too much")
    return 1.0
"""


def write_rows(path: Path, count: int) -> None:
    rows = []
    for number in range(count):
        rule = f"Rule {number % 2}: " + "answer with the sum as JSON, and with nothing else than that. " * 3
        asked = [{"role": "system", "content": rule}, {"role": "user", "content": f"{number} and {2 * number}?"}]
        target = {"role": "assistant", "content": json.dumps({"sum": 3 * number})}
        row = {"id": f"row {number}", "messages": [*asked, target], "meta": {"number": number}}
        if path.stem == "other" and number == 1:
            row |= {"messages": asked, "targets": ["3", '{"sum": 3}']}
        rows.append(row)
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("train", 8), ("heldout", 7), ("other", 3), ("two", 2)):
        write_rows(folder / f"{name}.jsonl", count)
    (folder / "own.py").write_text(OWN)
    return folder


def options(data: Path, heldout: str = "heldout", **changes: Any) -> Config:
    return Config(
        name="evaluated",
        cluster="debug",
        model=ModelConfig(build=BUILD, dtype="float32"),
        data=DataConfig(train=str(data / "train.jsonl"), heldout=str(data / f"{heldout}.jsonl")),
        pack=PackConfig(max_positions=1024, packs_per_update=1),
        train=TrainConfig(updates=2, lr=5e-3, warmup_updates=1, save_every=1),
        evaluate=EvaluateConfig(
            **{"metrics": ["exact", "json", f"{data}/own.py:length"], "max_new_tokens": 4, **changes}
        ),
    )


def make_run(folder: Path, config: Config) -> Path:
    folder.mkdir(parents=True)
    runfolder.write_text(folder / runfolder.CONFIG, compose.to_yaml(config))
    metrics.freeze(folder / runfolder.METRIC_FILES, config.evaluate.metrics)
    return folder


def lines(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


# Split over ranks.


def answer(rank: int, config: Config, folder: Path) -> None:
    """What a rank has of the answers of an untrained model goes into `folder`."""
    with dist.joined(60) as ranks:
        model = tiny.build_model(BUILD, 0)
        processor = tiny.build_processor(model.config)
        heldout = Heldout.load(config, Renderer(processor, model.config), ranks)
        assert heldout is not None
        wanted = heldout.metrics(folder / "metrics", config, ranks)
        scored = outcome.answered(model, processor, heldout, config, wanted, ranks)
        mine = evaluate.shares(heldout.order, ranks.world)[rank]
    figures = {"mine": mine, **evaluate.figures(scored)}
    runfolder.write_json(folder / f"rank{rank}-of-{ranks.world}.json", figures)
    evaluate.write(folder / f"of-{ranks.world}-by-{rank}", scored, {}, figures, folder)


def answered(config: Config, folder: Path, world: int) -> list[dict[str, Any]]:
    """Every rank's figures."""
    ranks = lives.start(answer, world, config, folder, environment={})
    for rank in ranks:
        rank.join(120)
    statuses = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert statuses == [0] * world, "nobody hangs and nobody fails"
    return [runfolder.read_json(folder / f"rank{rank}-of-{world}.json") for rank in range(world)]


def test_ranks_share_the_answers_and_all_have_the_same(tmp_path: Path, data: Path) -> None:
    config = options(data)
    metrics.freeze(tmp_path / "metrics", config.evaluate.metrics)
    (alone,) = answered(config, tmp_path, 1)
    first, second = answered(config, tmp_path, 2)
    assert sorted(first["mine"] + second["mine"]) == list(range(7))
    assert {number % 2 for number in first["mine"][:3]} == {first["mine"][0] % 2}, "neighbours in the tree together"
    for one in (first, second):
        assert one["metrics"] == alone["metrics"]
        assert one["generated"]["logical"] == alone["generated"]["logical"]
    whole = lines(tmp_path / "of-1-by-0" / evaluate.PREDICTIONS)
    assert [line["line"] for line in whole] == list(range(1, 8)), "in the file's order"
    for rank in range(2):
        assert lines(tmp_path / f"of-2-by-{rank}" / evaluate.PREDICTIONS) == whole


def test_a_metric_that_raises_on_one_rank_hangs_none_also_with_one_without_examples(tmp_path: Path, data: Path) -> None:
    config = options(data, metrics=["exact", f"{data}/own.py:picky"])
    metrics.freeze(tmp_path / "metrics", config.evaluate.metrics)
    for one in answered(config, tmp_path, 2):
        assert "own.py:picky: " in one["mistake"]
        assert one["mistake"].endswith("heldout.jsonl:6: the function raised ValueError: five is too much")
        assert one["metrics"].keys() == {"exact"}
    config = options(data, heldout="two", metrics=["exact", f"{data}/own.py:picky"])
    figures = answered(config, tmp_path, 3)
    assert sorted(len(one["mine"]) for one in figures) == [0, 1, 1]
    assert all(one["metrics"]["picky"] == 1.0 for one in figures)


# A whole run, and what is asked of it afterwards.


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    run = make_run(tmp_path_factory.mktemp("runs") / "run", options(data))
    assert train.main(run) == 0
    return run


@pytest.fixture
def run(done: Path, tmp_path: Path) -> Path:
    return shutil.copytree(done, tmp_path / "run")


def test_the_result_has_every_metric_and_the_predictions(done: Path) -> None:
    result = runfolder.read_json(done / runfolder.RESULT)
    assert result["metrics"].keys() == {"exact", "json", "length"}
    assert result["metrics"]["exact"] == result["accuracy"]
    assert result["metrics"]["json"]["examples"] == 7
    found = lines(result["predictions"])
    assert Path(result["predictions"]) == done / "evaluations" / "update-000002" / "predictions.jsonl"
    assert [line["line"] for line in found] == list(range(1, 8))
    for line in found:
        assert line["target"] == json.dumps({"sum": 3 * (line["line"] - 1)})
        assert line["metrics"]["length"] == {"letters": len(line["prediction"]), "wanted": len(line["target"])}
        assert line["finish"] in ("stop", "length")
        assert 1 <= line["tokens"] <= 4
    assert sum(line["loss"] for line in found) / 7 == pytest.approx(result["heldout_loss"])
    assert result["generated"]["prompt"] < result["generated"]["logical"] / 2


def test_what_trained_is_gone_before_answers_are_written(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory, on the device and pinned, is needed for a whole model on every rank."""
    alive: list[Any] = []
    restored = outcome.restored

    def look(*arguments: Any) -> Any:
        alive.extend(one for one in gc.get_objects() if type(one) in (train.Life, models.Root))
        return restored(*arguments)

    monkeypatch.setattr(outcome, "restored", look)
    config = replace(options(data, metrics=["exact"]), train=TrainConfig(updates=1))
    assert train.main(make_run(tmp_path / "run", config)) == 0
    assert not alive


def test_evaluate_again_says_the_same(run: Path, done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = command(capsys, "evaluate", str(run), "--json")
    assert (status, err) == (0, "")
    found, result = json.loads(out.splitlines()[-1]), runfolder.read_json(done / runfolder.RESULT)
    assert (found["metrics"], found["generated"]) == (result["metrics"], result["generated"])
    assert found["heldout_loss"] == pytest.approx(result["heldout_loss"], rel=1e-6)
    assert found["update"] == 2
    assert f"predictions: {run}/evaluations/update-000002-later/predictions.jsonl" in out


def test_a_run_that_has_had_a_second_life_is_evaluated_and_planned_too(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person's shell is no rank of a life: it has no number of one, and writes all the same."""
    (run / runfolder.ATTEMPT).write_text("1\n")
    shutil.rmtree(run / "evaluations")
    assert command(capsys, "plan", str(run))[0] == 0
    assert runfolder.read_json(run / runfolder.PLAN)
    assert command(capsys, "evaluate", str(run))[0] == 0
    assert runfolder.read_json(run / "evaluations" / "update-000002-later" / evaluate.SUMMARY)["update"] == 2
    with pytest.raises(runfolder.StaleAttempt):
        evaluate.write(run / "evaluations" / "stale", None, {}, {}, run)


def evaluate_again(rank: int, run: Path) -> None:
    """As `torchrun prefix-train evaluate RUN` does it, on one of its ranks."""
    found = review.evaluate(run, review.Evaluation())
    runfolder.write_json(run / f"found-by-{rank}.json", found)


def test_two_ranks_evaluate_together(run: Path) -> None:
    ranks = lives.start(evaluate_again, 2, run, environment={})
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    first, second = (runfolder.read_json(run / f"found-by-{rank}.json") for rank in range(2))
    assert first == second
    names = ("update-000002", "update-000002-later")
    whole, again = (lines(run / "evaluations" / name / "predictions.jsonl") for name in names)
    assert [line | {"loss": 0} for line in again] == [line | {"loss": 0} for line in whole]
    assert [line["loss"] for line in again] == pytest.approx([line["loss"] for line in whole], rel=1e-5)


def evaluate_otherwise(rank: int, run: Path, what: str) -> None:
    """As above, but rank 1 does not find what rank 0 finds; what each says of it."""
    asked = review.Evaluation()
    if rank == 1 and what == "update":
        asked = review.Evaluation(update=1)
    elif rank == 1:
        owner, name = (review, "find_checkpoint") if what == "checkpoint" else (outcome, "restore")
        setattr(owner, name, refuse)
    try:
        review.evaluate(run, asked)
    except (UserError, dist.Disagreement) as error:
        (run / f"said-by-{rank}").write_text(str(error))


def refuse(*arguments: Any, **named: Any) -> Any:
    raise UserError("it is not here")


DISAGREE = "ranks disagree on what to evaluate: rank 0: update-000002-later, rank 1: update-000001-later"


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("checkpoint", "rank 1: it is not here", "it is not here"),
        ("model", "rank 1: it is not here", "it is not here"),
        ("update", *[DISAGREE] * 2),
    ],
)
def test_a_rank_that_finds_something_else_leaves_none_waiting(run: Path, what: str, first: str, second: str) -> None:
    ranks = lives.start(evaluate_otherwise, 2, run, what, environment={})
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert [(run / f"said-by-{rank}").read_text() for rank in range(2)] == [first, second]


def test_verify_says_in_a_line_whether_it_passed(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what was compared above it, and as JSON below it where that is asked for."""
    status, out, err = command(capsys, "verify", str(run), "--examples", "2")
    assert (status, err) == (0, "")
    *table, last = out.splitlines()
    assert re.fullmatch(r"verify passed: 2 examples, mean loss differs by \S+, the worst of \d+ gradients by \S+", last)
    assert [line.split("  ")[1] for line in table[1:5]] == list(verify.WORDS.values())
    assert table[5].strip().startswith("the worst gradient is that of base_model.")
    monkeypatch.setattr(verify, "bounds_for", lambda *_: verify.Bounds(-1.0, 1.0, 1.0, None))
    status, out, err = command(capsys, "verify", str(run), "--examples", "1", "--json")
    *_, last, document = out.splitlines()
    assert (status, json.loads(document)["failed"]) == (1, ["mean_loss"])
    assert last.startswith("verify FAILED in mean_loss: 1 example, mean loss differs by ")
    assert "(not judged)" in out


def test_a_damaged_checkpoint_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (stored,) = (run / "checkpoints" / "update-000002").glob("model*")
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.write_bytes(content)
    status, out, err = command(capsys, "evaluate", str(run))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"{stored} is damaged: its SHA-256 is not its manifest's" in err


def test_before_and_after_and_between(run: Path, data: Path) -> None:
    base = review.evaluate(run, review.Evaluation(base=True))
    first = review.evaluate(run, review.Evaluation(update=1))
    last = review.evaluate(run, review.Evaluation())
    assert base["heldout_loss"] > first["heldout_loss"] > last["heldout_loss"]
    assert [one["evaluation"] for one in (base, first, last)] == ["base", "update-000001-later", "update-000002-later"]
    assert len({Path(one["predictions"]).read_text() for one in (base, first, last)}) == 3
    other = review.evaluate(run, review.Evaluation(data=data / "other.jsonl", changes=("evaluate.max_new_tokens=2",)))
    assert other["evaluation"].startswith("update-000002-other-")
    assert other["heldout_examples"] == 4, "one row has two targets"
    found = lines(other["predictions"])
    assert [(line["line"], line["target"]) for line in found[1:3]] == [(2, "3"), (2, '{"sum": 3}')]
    assert found[1]["prediction"] == found[2]["prediction"]
    assert found[2]["metrics"]["length"]["wanted"] == 10
    assert other["generated"]["answers"] == sum(line["tokens"] for line in found) - found[1]["tokens"]
    assert max(line["tokens"] for line in found) <= 2


def test_whatever_is_evaluated_later_leaves_the_runs_own_evaluation_as_it_is(run: Path) -> None:
    before = {path: path.read_bytes() for path in (run / "evaluations").rglob("*") if path.is_file()}
    assert len(before) == 2
    few = review.evaluate(run, review.Evaluation(changes=("evaluate.examples=3", "evaluate.max_new_tokens=2")))
    more = review.evaluate(run, review.Evaluation(changes=("evaluate.examples=4", "evaluate.max_new_tokens=2")))
    assert few["evaluation"].startswith("update-000002-examples_3_max_new_tokens_2-")
    assert few["changes"] == ["evaluate.examples=3", "evaluate.max_new_tokens=2"]
    assert [len(lines(one["predictions"])) for one in (few, more)] == [3, 4]
    silent = review.evaluate(run, review.Evaluation(changes=("evaluate.generate=false",)))
    assert "predictions" not in silent
    review.evaluate(run, review.Evaluation())
    assert {path: path.read_bytes() for path in before} == before
    assert len(list((run / "evaluations").iterdir())) == 5


def test_the_page_shows_what_the_run_found_and_what_evaluate_found_before_and_after(run: Path) -> None:
    few = review.Evaluation(changes=("evaluate.examples=3",))
    later = [review.evaluate(run, asked) for asked in (review.Evaluation(base=True), review.Evaluation(), few)]
    (found,) = page.read([run])
    assert [line for line in found.missing if "evaluations" in line] == []
    named = {one.name: one for one in found.evaluations}
    assert next(iter(named)) == "base"
    assert set(named) == {"update-000002", *(one["evaluation"] for one in later)}
    for one in later:
        shown = named[one["evaluation"]]
        assert (shown.update, shown.heldout_loss) == (one["update"], one["heldout_loss"])
        assert len(shown.predictions) == one["heldout_examples"]
    table = scores.table(found.evaluations)
    assert table is not None
    assert [row[0] for row in table.rows] == list(named)


def test_an_evaluation_without_answers_leaves_none_of_an_earlier_one(run: Path) -> None:
    place = run / "evaluations" / "update-000002"
    assert (place / evaluate.PREDICTIONS).exists()
    evaluate.write(place, None, {}, {"update": 2}, None)
    assert [path.name for path in place.iterdir()] == [evaluate.SUMMARY]


def test_another_metric_afterwards_is_copied_too(run: Path, data: Path) -> None:
    change = f"evaluate.metrics=[exact,{data}/own.py:picky]"
    with pytest.raises(UserError, match=r"heldout\.jsonl:6: the function raised ValueError: five is too much"):
        review.evaluate(run, review.Evaluation(changes=(change,)))
    (place,) = (run / "evaluations").glob("update-000002-metrics_exact_*")
    assert (place / "0-own.py").read_text() == OWN
    summary = runfolder.read_json(place / evaluate.SUMMARY)
    assert summary["mistake"].endswith("five is too much")
    assert summary["metrics"].keys() == {"exact"}
    assert all(line["metrics"].keys() == {"exact"} for line in lines(place / evaluate.PREDICTIONS))


def test_a_metric_that_is_mended_is_used_as_it_is_now(tmp_path: Path, data: Path) -> None:
    """Named by the same words as in the run, whose copy is the broken one and stays the run's own."""
    own = tmp_path / "mine.py"
    own.write_text("def f(prediction, example):\n    return 1.0\n")
    run = make_run(tmp_path / "run", replace(options(data, metrics=[f"{own}:f"]), train=TrainConfig(updates=1)))
    assert train.main(run) == 0
    own.write_text("def f(prediction, example):\n    return 0.5\n")
    assert review.evaluate(run, review.Evaluation())["metrics"] == {"f": 1.0}
    mended = review.Evaluation(changes=(f"evaluate.metrics=[{own}:f]",))
    for value in (0.5, 0.25):
        own.write_text(f"def f(prediction, example):\n    return {value}\n")
        found = review.evaluate(run, mended)
        assert found["metrics"] == {"f": value}
        assert str(value) in (Path(found["predictions"]).parent / "0-mine.py").read_text()
    assert "1.0" in (run / runfolder.METRIC_FILES / "0-mine.py").read_text()


def test_a_metric_that_fails_at_the_end_takes_no_result_with_it(tmp_path: Path, data: Path) -> None:
    config = replace(options(data, metrics=["exact", f"{data}/own.py:picky"]), train=TrainConfig(updates=1))
    run = make_run(tmp_path / "run", config)
    with pytest.raises(UserError, match="five is too much"):
        train.main(run)
    result = runfolder.read_json(run / runfolder.RESULT)
    assert result["mistake"].endswith("five is too much")
    assert "exact" in result["metrics"]
    assert (run / runfolder.ADAPTER).is_dir()


def test_a_metric_that_cannot_be_used_ends_a_run_before_its_first_update(tmp_path: Path, data: Path) -> None:
    own = tmp_path / "bad.py"
    own.write_text("def f(prediction, example):\n    return float('nan')\n")
    run = make_run(tmp_path / "run", options(data, metrics=[f"{own}:f"]))
    with pytest.raises(UserError, match=r"bad\.py:f: .*heldout\.jsonl:1: the function gave nan: give a finite number"):
        train.main(run)
    assert not (run / runfolder.METRICS).exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--checkpoint", "7"], "has no checkpoint of update 7; it has those of 1, 2"),
        (["--base", "--checkpoint", "1"], "leave out --checkpoint 1"),
        (["train.lr=1"], "the options of a run are frozen, all but evaluate.*"),
        (["evaluate.metrics=exakt"], "'exakt' is no metric"),
        (["evaluate.metrics=none.py:f"], "none.py cannot be read: No such file"),
        (["--data", "no.jsonl"], "no.jsonl: no such file"),
        (["--data", os.fsdecode(b"na\xefve.jsonl")], "na\\udcefve.jsonl: the name is not UTF-8"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    done: Path, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    status, out, err = command(capsys, "evaluate", str(done), *argv)
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_the_command_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = command(capsys, "evaluate", "--help")
    assert status == 0
    assert all(word in out for word in ("--checkpoint", "--base", "--data", "--json"))
    assert cli.app is not None
