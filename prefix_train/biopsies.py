"""Real tabular data as chat: scikit-learn's 569 breast biopsies, each with five measures, under one long instruction.

Each measure is told as a whole number and as a grade, a fifth of the training split: a small model reads words in fewer
updates than digits. The instruction is about 600 tokens of such a model, a biopsy and its diagnosis about 75.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer

from prefix_train.digits import HELDOUT, TRAIN, write_files

Floats = NDArray[np.float64]

MEASURES = {
    "worst radius": ("radius", 10),
    "worst texture": ("texture", 1),
    "worst smoothness": ("smoothness", 1000),
    "worst concavity": ("concavity", 1000),
    "worst concave points": ("concave points", 1000),
}
"""scikit-learn's name of a measure: ours, and the factor by which it becomes a whole number."""

GRADES = ("very low", "low", "medium", "high", "very high")

TRAIN_ROWS = 400
"""Biopsies in the training split; the other 169 are held out."""


def write_biopsies(folder: Path, cases: int = 0) -> dict[str, int]:
    """Write `heldout.jsonl` and, last, `train.jsonl` into `folder`; returns examples per file. See `write_files`.

    cases: so many biopsies of the training split stand in the instruction as solved cases, and are not trained on.
    """
    order, text = _order(), instruction(cases)
    files = {}
    for name, rows in ((HELDOUT, order[TRAIN_ROWS:]), (TRAIN, order[cases:TRAIN_ROWS])):
        examples = ({"id": f"biopsy-{row:03d}", "messages": _messages(text, *_case(row))} for row in rows)
        files[name] = "".join(json.dumps(example) + "\n" for example in examples).encode()
    return write_files(folder, files)


def instruction(cases: int = 0) -> str:
    """What all examples begin with: the register, and the first `cases` biopsies of the training split, solved."""
    text = resources.files("prefix_train").joinpath("demo", "biopsies.md").read_text(encoding="utf-8").strip()
    if not cases:
        return text
    solved = "".join(f"\n{told}\n{answer}" for told, answer in map(_case, _order()[:cases]))
    return f"{text}\n\nSolved cases of the register{solved}"


def _order() -> list[int]:
    """The biopsies in a fixed random order: first those of the training split."""
    order: list[int] = np.random.RandomState(0).permutation(len(load_breast_cancer().target)).tolist()
    return order


@cache
def _table() -> tuple[Floats, Floats, tuple[str, ...]]:
    """[569, 5] measures, [4, 5] limits between grades, and each biopsy's diagnosis."""
    data = load_breast_cancer()
    columns = [data.feature_names.tolist().index(name) for name in MEASURES]
    values = data.data[:, columns]
    limits = np.quantile(values[_order()[:TRAIN_ROWS]], [0.2, 0.4, 0.6, 0.8], axis=0)
    return values, limits, tuple(str(data.target_names[target]) for target in data.target)


def _case(row: int) -> tuple[str, str]:
    """What is told of the biopsy in `row`, and the answer."""
    values, limits, diagnoses = _table()
    told = [
        f"{name} {round(value * factor)} ({GRADES[int(np.searchsorted(between, value))]})"
        for (name, factor), value, between in zip(MEASURES.values(), values[row].tolist(), limits.T, strict=True)
    ]
    return ", ".join(told), json.dumps({"diagnosis": diagnoses[row]})


def _messages(text: str, told: str, answer: str) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": text},
        {"role": "user", "content": told},
        {"role": "assistant", "content": answer},
    ]
