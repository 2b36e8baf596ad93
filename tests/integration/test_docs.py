"""The Python that the pages show runs, and the commands whose output they show still print such lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForImageTextToText

from configs import compose
from prefix_train import tiny
from tests import documents, documents_code, models
from tests.documents import ROOT, Block

RUN_ELSEWHERE = {
    "plain-loop.md": "tests/numerics/test_packs.py",
}
"""Pages whose Python other tests run, and where."""


def _readme(folder: Path) -> dict[str, Any]:
    """A model and an adapter where the README has them, and what its lines take for given."""
    model = models.build("qwen3_5")
    model.save_pretrained(folder / "models/my-model")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(folder / "runs/.../adapter")
    return {
        "AutoModelForImageTextToText": AutoModelForImageTextToText,
        "PeftModel": PeftModel,
        "ids": torch.randint(0, 80, (1, 84)),
    }


def _adapters(folder: Path) -> dict[str, Any]:
    """A language model and an adapter of it."""
    model = models.build("qwen3")
    model.save_pretrained(folder / "models/my-model")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"])).save_pretrained(folder / "runs/.../adapter")
    return {}


STAND_INS: dict[str, Callable[[Path], dict[str, Any]]] = {"README.md": _readme, "adapters.md": _adapters}
SMALLER = {"README.md": {64000: 64, 1000: 10}}


def python_pages() -> list[tuple[Path, list[Block]]]:
    found = [
        (page, [block for block in documents.blocks(page) if block.language == "python"]) for page in documents.pages()
    ]
    return [(page, blocks) for page, blocks in found if blocks]


@pytest.mark.parametrize(("page", "blocks"), python_pages(), ids=lambda value: getattr(value, "name", ""))
def test_the_python_of_a_page_runs(
    page: Path, blocks: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.name in RUN_ELSEWHERE:
        assert f"docs/guides/{page.name}" in (ROOT / RUN_ELSEWHERE[page.name]).read_text(encoding="utf-8")
        return
    monkeypatch.chdir(tmp_path)
    namespace = STAND_INS[page.name](tmp_path) if page.name in STAND_INS else {}
    run = [block for block in blocks if not block.note.startswith(documents_code.NOT_RUN)]
    documents_code.execute(run, namespace, SMALLER.get(page.name, {}))
    if page.name == "README.md":
        assert isinstance(namespace["model"], PeftModel)
        assert namespace["out"].logits.shape[:2] == (1, 84)


@pytest.mark.parametrize("name", ["plain-loop.md", "transformers-trainer.md", "accelerate.md"])
def test_each_page_for_a_trainer_of_ones_own_compares_itself(name: str) -> None:
    """As the README says: with every example alone, and it ends where they differ."""
    code = "".join(block.text for block in documents.blocks(ROOT / "docs/guides" / name) if block.language == "python")
    assert "use_cache=False).loss / len(members)" in code
    assert re.search(r"assert abs\(one - \w+\) < 1e-4", code)


def test_a_planted_fault_in_python_is_found(tmp_path: Path) -> None:
    block = Block(tmp_path / "page.md", 7, "python", "a = 64000\nassert a == 1\n")
    with pytest.raises(AssertionError) as told:
        documents_code.execute([block], {}, {64000: 64})
    assert str(told.traceback[-1].path) == "page.md:7"
    documents_code.execute([Block(tmp_path / "page.md", 7, "python", "assert 64000 == 64")], {}, {64000: 64})


def shown(command: str) -> list[str]:
    """Lines that pages show as printed by `command`."""
    blocks = [block for page in documents.pages() for block in documents.blocks(page)]
    return [line for block in blocks if block.note == f"from: {command}" for line in block.text.splitlines()]


def printed(folder: Path, *words: str, status: int = 0) -> list[str]:
    """Lines that `prefix-train` prints in `folder`."""
    program, environment = [sys.executable, "-m", "prefix_train.cli", *words], os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == status, ran.stderr
    return [*ran.stdout.splitlines(), *ran.stderr.splitlines()]


def test_the_plan_of_the_demonstration_is_the_one_that_is_shown(tmp_path: Path) -> None:
    printed(tmp_path, "data", "digits")
    lines = printed(tmp_path, "plan", str(ROOT / "configs/digits.yaml"))
    assert len(shown("prefix-train plan configs/digits.yaml")) > 5
    assert {*shown("prefix-train plan configs/digits.yaml")} <= {*lines}


def test_the_plans_of_own_data_are_those_that_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Good rows, a row with a wrong role, and rows that begin with a date."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/guides/own-data.md"
    documents_code.execute([block for block in documents.blocks(page) if block.language == "python"], {}, {})
    config = tiny.build_config(compose.load(ROOT / "configs/digits.yaml").model.build)
    for part in (config, tiny.build_processor(config)):
        part.save_pretrained("models/my-model")
    rows = Path("data/train.jsonl").read_text(encoding="utf-8").splitlines()
    dated = [row.replace("You sort", f"Today is 2026-11-0{index % 3 + 1}. You sort") for index, row in enumerate(rows)]
    Path("data/dated.jsonl").write_text("\n".join(dated) + "\n", encoding="utf-8")
    lines = printed(tmp_path, "plan", "data/train.jsonl", "--model", "models/my-model")
    rows[2] = rows[2].replace('"assistant"', '"assistent"')
    Path("data/train.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    lines += printed(tmp_path, "plan", "data/train.jsonl", "--model", "models/my-model", status=2)
    lines += printed(tmp_path, "plan", "data/dated.jsonl", "--model", "models/my-model")
    for name in ("train", "dated"):
        wanted = shown(f"prefix-train plan data/{name}.jsonl --model models/my-model")
        assert len(wanted) >= 5
        assert [line for line in wanted if line not in lines] == []
