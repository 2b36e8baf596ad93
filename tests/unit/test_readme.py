"""What the README says is so: its figures come from the committed measurements, what it names exists."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from configs import compose
from prefix_train.data import read_jsonl

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_figures_are_those_of_the_committed_measurements() -> None:
    figures = runpy.run_path(str(ROOT / "docs" / "figures.py"))
    assert figures["with_figures"](README) == README
    assert "times fewer" in README


def test_files_that_it_names_exist() -> None:
    named = set(re.findall(r"`((?:tests|configs|docs)/[\w./-]+)`", README)) | set(
        re.findall(r"\]\(([\w./-]+)\)", README)
    )
    assert len(named) > 8
    assert not [name for name in named if not (ROOT / name).exists()]


def test_make_targets_that_it_names_exist() -> None:
    targets = set(re.findall(r"make ([a-z][a-z-]+)", README))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"demo", "test", "test-all", "replays"} <= targets
    assert not [target for target in targets if not re.search(rf"^{target}:", makefile, re.M)]


def test_setting_up_says_what_it_does_and_how_much_that_is() -> None:
    """Minutes of silence look like a hang: each download is announced, and the largest shows how far it is."""
    told = subprocess.run(["make", "-n", "-B", "setup"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line for line in told.splitlines() if not line.startswith("#")]
    first = next(line for line in lines if line.startswith("echo"))
    assert re.search(r"3 to 6 GB .* two minutes", first)
    assert "3 to 6 GB on disk, two minutes or more" in README
    places = [place for place, line in enumerate(lines) if " pip install " in line]
    assert len(places) == 4
    for number, place in enumerate(places, 1):
        assert lines[place - 1].startswith(f"echo '{number} of 4: ")
    assert "--quiet" not in lines[places[0]]


def test_the_data_row_that_it_shows_is_good(tmp_path: Path) -> None:
    row = re.search(r"```json\n(.+?)\n```", README, re.S)
    assert row is not None
    (tmp_path / "shown.jsonl").write_text(row[1] + "\n")
    assert len(list(read_jsonl(tmp_path / "shown.jsonl"))) == 1


def test_the_configuration_that_it_shows_is_good(tmp_path: Path) -> None:
    shown = re.search(r"```yaml\n(.+?)```", README, re.S)
    assert shown is not None
    (tmp_path / "mine.yaml").write_text(shown[1])
    config = compose.load(tmp_path / "mine.yaml")
    assert config.train.trainable == "adapter"
    assert config.pack.packs_per_update == 2 * config.ranks


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`(prefix-train [a-z]+|python -m [a-z.]+)[^`]*`", README))))
def test_commands_that_it_names_have_help(command: str) -> None:
    words = shlex.split(command)
    program = (
        [sys.executable, "-m", "prefix_train.cli", *words[1:]] if words[0] != "python" else [sys.executable, *words[1:]]
    )
    ran = subprocess.run([*program, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "Usage" in ran.stdout
