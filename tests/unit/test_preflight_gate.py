"""What the judge of a job says of nodes and ranks together, and what an administrator gets of it."""

from __future__ import annotations

import json
import os
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from configs import console, runfolder
from configs.errors import UserError
from preflight import __main__, drain, ranks
from preflight.pairs import RankReport
from preflight.programs import Answer
from preflight.states import Finding, NodeReport

CONFIG = "model: {build: {model_type: qwen3}}\ndata: {train: t}\npack: {packs_per_update: 4}\ntrain: {updates: 1}\n"
NODES = ("n1", "n2")
FIT = Finding("python.version", "pass", "Python 3.11")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose two nodes are fit."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    for node in NODES:
        runfolder.write_json(tmp_path / f"preflight/0/{node}.json", NodeReport(node, (FIT,)).to_json())
    return tmp_path


def answer(run: Path, *places: int) -> None:
    """Ranks that waited for those that are not among `places`, of four."""
    missing = [rank for rank in range(4) if rank not in places]
    steps: list[dict[str, Any]] = [
        {"begin": "store"},
        {"stage": "store"},
        {"begin": "join"},
        {"stage": "join", "missing": missing},
    ]
    steps += [] if missing else [{"stage": "group", "backend": "gloo"}, {"stage": "done"}]
    for rank in places:
        report = RankReport(rank, NODES[rank // 2], tuple(steps))
        runfolder.write_json(run / f"preflight/0/{ranks.FOLDER}/rank{rank}.json", asdict(report))


def judged(run: Path, quiet: bool = False, expect: int = 4) -> tuple[int, list[str], str]:
    status = __main__.judge_command(run, ",".join(NODES), expect, quiet)
    folder = run / "preflight" / "0"
    return status, runfolder.read_json(folder / "report.json")["bad_nodes"], (folder / "report.txt").read_text()


def test_all_is_well(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer(run, 0, 1, 2, 3)
    assert judged(run, quiet=True)[:2] == (0, [])
    assert capsys.readouterr().out == ""
    status, bad, text = judged(run)
    assert (status, bad) == (0, [])
    assert "between ranks: 4 ranks on 2 node(s): right values over gloo" in text
    assert capsys.readouterr().out == text
    assert "scontrol" not in text


def test_a_rank_that_never_came_is_its_nodes_and_nobody_elses(run: Path) -> None:
    answer(run, 0, 1, 2)
    status, bad, text = judged(run, quiet=True)
    assert (status, bad) == (1, ["n2"])
    assert text.startswith("FAIL n2: silent: collective.join: rank 3 never joined")
    command = shlex.split(text.splitlines()[-1])
    assert command[:4] == ["scontrol", "update", "NodeName=n2", "State=DRAIN"]
    assert command[4].startswith("Reason=collective.join: rank 3 never joined")


def test_a_step_that_never_began_is_no_nodes_fault(run: Path) -> None:
    status, bad, text = judged(run)
    assert (status, bad) == (1, ["the job"])
    assert "none of 4 ranks has answered: the collective test did not begin" in text
    assert "scontrol" not in text


def test_where_all_nodes_are_unfit_none_is_to_be_drained(run: Path) -> None:
    for node in NODES:
        broken = NodeReport(node, (Finding("device.gpus", "fail", "7 GPUs"),))
        runfolder.write_json(run / f"preflight/0/{node}.json", broken.to_json())
    status, bad, text = judged(run, expect=0)
    assert (status, bad) == (1, list(NODES))
    assert "scontrol" not in text


def test_the_administrators_command_is_safe_and_short() -> None:
    words = shlex.split(drain.command("n1;x", 'it\'s\n$(touch x) "a" `b`' + " z" * 500))
    assert words[:4] == ["scontrol", "update", "NodeName=n1;x", "State=DRAIN"]
    assert words[4].startswith('Reason=it\'s $(touch x) "a" `b` z')
    assert len(words[4]) == len("Reason=") + drain.MOST


@pytest.mark.parametrize(("gpus", "visible"), [(0, ""), (2, "0,1")])
def test_ranks_of_a_run_on_the_cpu_see_no_gpu(
    run: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, visible: str
) -> None:
    """A machine with one GPU runs two ranks on its CPU: the second would have no device of its own."""
    seen: dict[str, str] = {}

    def ask(*_: object) -> Answer:
        seen.update(os.environ)
        return Answer(0, "", "")

    monkeypatch.setattr(ranks, "ask", ask)
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    for name, text in place.items():
        monkeypatch.setenv(name, text)
    ranks.test_rank(run / "preflight" / "0", run, 10.0, gpus)
    assert seen["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize(
    "change",
    [
        {"findings": []},  # nothing was checked
        {"findings": [asdict(FIT) | {"state": "maybe"}]},
        {"findings": [asdict(FIT) | {"check": 5}]},
        {"findings": [asdict(FIT) | {"facts": None}]},
        {"findings": 5},
        {"wall": float("nan")},
        {"node": None},
        {"node": "n2"},
    ],
)
def test_what_is_no_answer_of_its_node_is_a_broken_check(run: Path, change: dict[str, Any]) -> None:
    path = run / "preflight/0/n1.json"
    path.write_text(json.dumps(runfolder.read_json(path) | change))
    status, bad, text = judged(run, expect=0)
    assert (status, bad) == (1, ["n1"])
    assert text.startswith("FAIL n1: broken: node.answer: n1.json is not this node's answer: ")


def test_an_answer_that_cannot_be_read_is_a_broken_check(run: Path) -> None:
    (run / "preflight/0/n1.json").unlink()
    (run / "preflight/0/n1.json").mkdir()
    assert judged(run, expect=0)[:2] == (1, ["n1"])


@pytest.mark.parametrize("text", ["", "[]", "{}", "5", '{"rank": 0, "node": "n1", "steps": [5]}'])
def test_a_ranks_damaged_answer_is_named(run: Path, text: str) -> None:
    answer(run, 0, 1, 2, 3)
    path = run / f"preflight/0/{ranks.FOLDER}/rank1.json"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(f"{path} is damaged")):
        judged(run)


@pytest.mark.parametrize("name", ["report.json", "report.html", "report.txt"])
def test_a_report_that_cannot_be_written_is_still_told(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "preflight/0" / name).mkdir()
    with pytest.raises(UserError, match=r"the report cannot be written into .*: Is a directory"):
        judged(run, expect=0)
    assert capsys.readouterr().out.startswith("PASS")


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--deadline", "0"),
        ("collectives", "RUN", "--spawn", "-1"),
        ("collectives", "NONE", "--spawn", "1"),
        ("judge", "RUN", "--ranks", "-1"),
        ("judge", "FILE"),
        ("show", "FILE"),
    ],
)
def test_bad_arguments_are_one_line(
    run: Path, tmp_path: Path, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"RUN": str(run), "NONE": str(tmp_path / "none"), "FILE": str(run / "config.yaml")}
    with pytest.raises(SystemExit) as ended:
        console.run(__main__.app, [places.get(argument, argument) for argument in arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
