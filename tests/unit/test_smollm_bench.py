"""The measurement of a pretrained model: what it counts as answered is what greedy decoding answers; a small whole."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from configs.schema import Config
from prefix_train import biopsies
from prefix_train import model as models_of_runs
from prefix_train.bench import star
from prefix_train.render import Example
from tests import models
from tests.bench import smollm

ROOT = Path(__file__).parents[2]
PROMPT, ANSWER, SHARED = 24, 5, 20


def answered(model: Any, index: int, wrong_at: int | None) -> Example:
    """A prompt and what transformers' own greedy decoding says to it, or that with one other token."""
    draw = np.random.default_rng(index)
    shared = np.random.default_rng(99).integers(0, 80, SHARED)
    prompt = np.concatenate([shared, draw.integers(0, 80, PROMPT - SHARED)])
    prompt[SHARED] = index
    given = torch.from_numpy(prompt)[None]
    whole = model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=ANSWER)
    ids = whole[0].numpy().astype(np.int64)
    assert len(ids) == PROMPT + ANSWER
    if wrong_at is not None:
        ids[PROMPT + wrong_at] = (ids[PROMPT + wrong_at] + 1) % models.VOCABULARY
    target = np.arange(len(ids)) >= PROMPT
    return Example(str(index), f"made:{index}", ids, ids, np.arange(len(ids))[None], target, (), "", PROMPT)


def test_exact_is_what_greedy_decoding_answers() -> None:
    """For right answers, and answers that are wrong in one token, at every place."""
    model = models.build("llama").eval()
    wrong = [None, 0, 1, ANSWER - 1, None, 2, None]
    examples = [answered(model, index, at) for index, at in enumerate(wrong)]
    root = models_of_runs.Root(models_of_runs.prepare(model, Config()), torch.float32, 64, images=False)
    heldout = SimpleNamespace(examples=examples, packs=lambda rank: (star(examples[:4], SHARED),))
    assert smollm.quality(root, heldout, torch.device("cpu"))["exact"] == 1 / 4
    packs = [star(examples[:4], SHARED), shifted(star(examples[4:], SHARED), 4)]
    heldout = SimpleNamespace(examples=examples, packs=lambda rank: packs)
    found = smollm.quality(root, heldout, torch.device("cpu"))
    assert found["exact"] == 3 / 7
    assert found["loss"] > 0


def shifted(pack: Any, by: int) -> Any:
    """The pack of examples that stand `by` further on."""
    origin = tuple((example + by, start) for example, start in pack.origin)
    return type(pack)(
        **{name: getattr(pack, name) for name in pack.__dataclass_fields__}
        | {"origin": origin, "members": tuple(member + by for member in pack.members)}
    )


def test_solved_cases_make_the_instruction_longer_and_are_not_trained_on(tmp_path: Path) -> None:
    none, some = tmp_path / "none", tmp_path / "some"
    assert biopsies.write_biopsies(some, cases=7) == {"train.jsonl": 393, "heldout.jsonl": 169}
    biopsies.write_biopsies(none)
    rows = {
        (folder.name, split): [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        for folder in (none, some)
        for split in ("train", "heldout")
    }
    for split, dropped in (("train", 7), ("heldout", 0)):
        told = [row["messages"][1:] for row in rows["none", split]][dropped:]
        assert [row["messages"][1:] for row in rows["some", split]] == told
    solved = rows["some", "train"][0]["messages"][0]["content"]
    plain = rows["none", "train"][0]["messages"][0]["content"]
    assert solved.startswith(plain)
    for row in rows["none", "train"][:7]:
        assert f"{row['messages'][1]['content']}\n{row['messages'][2]['content']}" in solved
    assert not [row for row in rows["some", "heldout"] if row["messages"][1]["content"] in solved]


def test_cases_are_added_until_the_instruction_is_long_enough() -> None:
    def tokenizer(text: str) -> dict[str, list[str]]:
        return {"input_ids": text.split()}

    least = len(tokenizer(biopsies.instruction())["input_ids"])
    assert smollm.cases_for(tokenizer, least) == 0
    cases = smollm.cases_for(tokenizer, least + 100)
    lengths = [len(tokenizer(biopsies.instruction(count))["input_ids"]) for count in (cases - 1, cases)]
    assert lengths[0] < least + 100 <= lengths[1]


@pytest.mark.slow
def test_a_small_measurement_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "smollm.json"
    sizes = ["--updates", "1", "--examples", "2", "--heldout", "2", "--threads", "1", "--seeds", "3"]
    program = [sys.executable, "-W", "ignore", "-m", "tests.bench.smollm", *sizes, "--out", str(out)]
    ran = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(out.read_text())
    assert [(run["seed"], run["side"]) for run in found["runs"]] == [(3, "packs"), (3, "alone")]
    assert found["prefix"] >= 600
    packs, alone = found["runs"]
    assert packs["logical_tokens"] == alone["logical_tokens"] == alone["positions"] > 1.7 * packs["positions"]
    assert np.allclose(packs["losses"], alone["losses"], rtol=0, atol=1e-4)
    assert abs(packs["loss"] - alone["loss"]) < 1e-3
    assert packs["loss"] < found["before"]["loss"]
    assert "alone took" in ran.stdout.splitlines()[-1]


def test_figures_tell_both_sides_and_the_range_of_seeds() -> None:
    table = runpy.run_path(str(ROOT / "docs" / "figures.py"))["smollm_table"]
    runs = [
        {"seed": seed, "side": side, "exact": exact, "loss": 0.07, "seconds": seconds, "positions": positions}
        for seed, exact in ((0, 0.9), (1, 0.94))
        for side, seconds, positions in (("packs", 100.0, 1000), ("alone", 700.0, 7000))
    ]
    found = {
        **{"device": "a CPU", "threads": 2, "dtype": "float32", "prefix": 655, "continuation": 57.2, "examples": 16},
        **{"updates": 8, "heldout_examples": 169, "chance": 0.62, "before": {"exact": 0.0}, "runs": runs},
    }
    lines = table(found).splitlines()
    assert all(line.count("|") == 4 for line in lines)
    assert "a CPU, 2 threads, float32, mean of 2 seeds" in lines[0]
    assert lines[2].endswith("| 92.0% (90.0% to 94.0%) | 92.0% (90.0% to 94.0%) |")
    assert lines[-1] == "| positions computed | 1,000 | 7,000 |"
    assert "mean of" not in table(found | {"runs": runs[:2]})
