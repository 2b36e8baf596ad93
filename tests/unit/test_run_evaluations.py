"""Evaluations on the page of a run: side by side, a sample of predictions, damage named, hostile text as text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs import runfolder
from prefix_train.results import scores
from tests import run_folders as made
from tests.run_page import shown

HOSTILE = "<script>alert(1)</script>\u202e"


def line(number: int, right: bool, **changes: Any) -> dict[str, Any]:
    target = json.dumps({"digit": number % 10})
    return {
        "line": number,
        "prediction": target if right else json.dumps({"digit": (number + 1) % 10}),
        "target": target,
        "metrics": {
            "exact": float(right),
            "json": {"valid": True, "right": {"digit": right}, "missing": [], "extra": []},
            "own": {"off": 0.5},
        },
        "finish": "stop",
        "tokens": 5,
        "loss": 0.125,
        **changes,
    }


def evaluation(run: Path, name: str, update: int, lines: list[dict[str, Any]], **changes: Any) -> None:
    """One of a run's evaluations; half of its answers are right."""
    folder = run / runfolder.EVALUATIONS / name
    shares = {"examples": 4, "valid": 1.0, "right": 0.5, "missing": 0, "extra": 0, "fields": {"digit": 0.5}}
    summary = {
        "update": update,
        "data": "heldout.jsonl",
        "heldout_examples": 4,
        "heldout_loss": 3.0 - update / 20,
        "metrics": {"exact": 0.5, "json": shares, "own": {"off": 0.5}},
        **changes,
    }
    made.put(folder / "summary.json", summary)
    (folder / "predictions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))


def test_before_and_after_stand_side_by_side(tmp_path: Path) -> None:
    run = made.complete(tmp_path / "demo-1")
    evaluation(run, "update-000040", 40, [line(1, True), line(2, False, finish="length"), line(3, True)])
    evaluation(run, "base", 0, [], metrics={"exact": 0.0}, mistake="own.py:f: it raised")
    evaluation(run, "update-000040-later", 40, [line(9, False)], predictions="/elsewhere.jsonl", evaluation="x")
    found, (read,) = shown(run)
    table = found.table("Held-out examples")
    assert list(table) == ["evaluation", "base", "update-000040", "update-000040-later"]
    assert table["evaluation"][4:] == ["exact", "json valid", "json right", "digit right", "own.off", "failed"]
    assert table["base"] == ["0", "heldout.jsonl", "4", "3", "0.0%", *["–"] * 4, "own.py:f: it raised"]
    assert table["update-000040"][3:] == ["1", "50.0%", "100.0%", "50.0%", "50.0%", "0.5", ""]
    sample = found.table("Some predictions of update-000040: 1 of the 3 are not the target")
    assert list(sample) == ["line", "2", "1", "3"], "wrong ones first"
    assert sample["2"][1].endswith("(cut: evaluate.max_new_tokens)")
    assert sample["2"][2] == "exact 0.0%; json 0 of 1 fields; own.off 0.5"
    assert read.missing == ()


def test_a_sample_is_short_and_has_right_ones_too(tmp_path: Path) -> None:
    run = made.complete(tmp_path / "demo-1")
    long = line(100, False, prediction="x" * 1000)
    evaluation(run, "update-000040", 40, [long, *(line(number, number % 2 == 0) for number in range(1, 50))])
    found, _ = shown(run)
    sample = found.table("Some predictions")
    assert len(sample) == 1 + scores.SAMPLE
    assert sum(int(number) % 2 == 0 for number in list(sample)[2:]) == 2
    assert sample["100"][1].endswith("… (1,000 letters)")


def test_damage_is_named_and_hostile_text_stays_text(tmp_path: Path) -> None:
    run = made.complete(tmp_path / "demo-1")
    evaluation(run, "update-000040", 40, [line(1, False, prediction=HOSTILE + "api_key=abc123")])
    with (run / runfolder.EVALUATIONS / "update-000040" / "predictions.jsonl").open("a") as stream:
        stream.write('{"line": 2\n')
    (run / runfolder.EVALUATIONS / "broken").mkdir()
    (run / runfolder.EVALUATIONS / "broken" / "summary.json").write_text("{")
    (run / runfolder.EVALUATIONS / "empty").mkdir()
    found, (read,) = shown(run)
    assert [name.partition(":")[0] for name in read.missing] == [
        "evaluations/broken/summary.json is damaged",
        "evaluations/empty/summary.json",
        "evaluations/update-000040/predictions.jsonl",
    ]
    assert "script" not in [tag for tag, _ in found.tags]
    cell = found.table("Some predictions")["1"][1]
    assert cell.startswith("<script>alert(1)</script>\\u202e")
    assert "abc123" not in str(found.texts)


def test_what_trackers_took_is_said(tmp_path: Path) -> None:
    run = made.complete(tmp_path / "demo-1")
    took = {"id": "x", "taken": 38, "failed": 2, "error": "ConnectionError: 503"}
    made.put(run / runfolder.RESULT, made.result(40, trackers={"wandb": took, "mlflow": {"taken": 40}}))
    found, _ = shown(run)
    cell = found.table("What was counted")["trackers"][0]
    assert cell == "wandb: 38 lines, 2 NOT (ConnectionError: 503); mlflow: 40 lines"
