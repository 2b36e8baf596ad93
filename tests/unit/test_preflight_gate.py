"""What the judge of a job says of nodes and ranks together, and what an administrator gets of it."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from configs import runfolder
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
