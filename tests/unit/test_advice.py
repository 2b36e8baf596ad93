"""Every command that a message, a comment or a recipe tells people to run exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import typer

from prefix_train import cli
from preflight import __main__ as preflight
from slurm import rules
from slurm.diagnose import Diagnosis
from slurm.verdict import Verdict

ROOT = Path(__file__).parents[2]
TEXTS = [path for folder in ("configs", "prefix_train", "preflight", "slurm") for path in (ROOT / folder).rglob("*")
         if path.suffix in (".py", ".yaml")]  # fmt: skip
COMMAND = re.compile(r"(python -m preflight|prefix-train) ([a-z]+)\b|python -m ([a-z_]+\.[a-z_]+)")
APPS = {"python -m preflight": preflight.app, "prefix-train": cli.app}


def unknown(text: str) -> list[str]:
    """Commands in `text` that do not exist."""
    known = {begin: set(typer.main.get_command(app).commands) for begin, app in APPS.items()}  # type: ignore[attr-defined]
    return [
        found[0]
        for found in COMMAND.finditer(text)
        if (importlib.util.find_spec(found[3]) is None if found[3] else found[2] not in known[found[1]])
    ]


def test_commands_that_are_named_exist() -> None:
    texts = [path.read_text(encoding="utf-8") for path in TEXTS]
    assert sum(len(COMMAND.findall(text)) for text in texts) > 30
    assert [command for text in texts for command in unknown(text)] == []


@pytest.mark.parametrize("command", ["python -m preflight pairs", "prefix-train sing", "python -m slurm.nothing"])
def test_one_that_does_not_exist_is_found(command: str) -> None:
    assert unknown(f"next: {command} RUN") == [command]


def test_advice_on_a_network_names_the_run() -> None:
    said = Verdict(0, "network", True, (), "lost connections", advice=rules.MEASURED)
    text = Diagnosis(Path("/runs/x"), None, said, "").text()
    assert "`python -m preflight show /runs/x`" in text
    assert "`srun python -m preflight collectives /runs/x`" in text
