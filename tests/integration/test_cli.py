"""The commands as people type them: statuses, one line for a mistake, nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs import console
from prefix_train import cli
from tests.chats import row
from tests.integration import test_bad_input
from tests.integration.test_bad_input import RENDERING, STRUCTURE

ROOT = Path(__file__).parents[2]
folder = test_bad_input.folder
CONFIG = str(ROOT / "configs" / "digits.yaml")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `prefix-train ARGV`."""
    with pytest.raises(SystemExit) as ended:
        console.run(cli.app, argv)
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from prefix_train.digits import write_digits

    made = tmp_path_factory.mktemp("cli") / "digits"
    write_digits(made)
    return made


def planned(place: Path, data: Path) -> list[str]:
    return ["plan", CONFIG, f"data.train={data}", f"data.heldout={data}", f"run_root={place / 'runs'}", "--json"]


def test_plan_prints_what_sharing_saves(capsys: pytest.CaptureFixture[str], tmp_path: Path, digits: Path) -> None:
    status, out, err = run(capsys, *planned(tmp_path, digits / "train.jsonl"))
    assert (status, err) == (0, "")
    document = json.loads(out.splitlines()[-1])
    assert document["examples"] == 1499
    assert document["ratio"] > 20
    assert "times fewer" in out


@pytest.mark.parametrize("kind", {**STRUCTURE, **RENDERING})
def test_a_bad_row_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, folder: Path, kind: str
) -> None:
    bad, _ = {**STRUCTURE, **RENDERING}[kind]
    data = folder / "train.jsonl"
    data.write_bytes(json.dumps(row(id="first")).encode() + b"\n" + bad + b"\n")
    status, out, err = run(capsys, *planned(tmp_path, data), "data.max_example_tokens=500")
    assert status == 2
    document = json.loads(out.splitlines()[-1])
    assert (document["examples"], len(document["skipped"])) == (1, 1)
    assert err.startswith((f"error: {data}:2: ", f"error: {data}:2 target 1: "))
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing is written for bad data"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["plan"], ["Missing argument"]),
        (["plan", "no-such.yaml"], ["no-such.yaml", "no such file"]),
        (["plan", CONFIG, "train.lrs=1"], ["train.lrs", "train.lr?"]),
        (["plan", CONFIG, "train.lr=fast"], ["train.lr"]),
        (["plan", CONFIG, "pack.max_positions=100"], ["pack.max_positions"]),
        (["plan", "data.jsonl"], ["--model"]),
        (["verify", "no-run"], ["no-run"]),
        (["evaluate", "."], ["run folder"]),
        (["nonsense"], ["nonsense"]),
        (["budget", CONFIG, "--nonsense"], ["--nonsense"]),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, digits: Path, argv: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(digits)
    if any("max_positions" in word for word in argv):
        argv = [*argv, f"data.train={digits / 'train.jsonl'}", f"run_root={digits / 'runs'}"]
    status, out, err = run(capsys, *argv)
    assert status == 2, (out, err)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
