"""Real tabular data as chat: scikit-learn's 569 breast biopsies, each with five measures, under one long instruction.

Each measure is told as a whole number and as a grade, a fifth of the training split: a small model reads words in fewer
updates than digits. The instruction is about 600 tokens of such a model, a biopsy and its diagnosis about 75.
"""

from __future__ import annotations

import json
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


def write_biopsies(folder: Path) -> dict[str, int]:
    """Write `heldout.jsonl` and, last, `train.jsonl` into `folder`; returns examples per file. See `write_files`."""
    data = load_breast_cancer()
    columns = [data.feature_names.tolist().index(name) for name in MEASURES]
    order = np.random.RandomState(0).permutation(len(data.target)).tolist()
    limits = np.quantile(data.data[order[:TRAIN_ROWS]][:, columns], [0.2, 0.4, 0.6, 0.8], axis=0)
    files = {}
    for name, rows in ((HELDOUT, order[TRAIN_ROWS:]), (TRAIN, order[:TRAIN_ROWS])):
        examples = (
            _example(row, data.data[row, columns], limits, str(data.target_names[data.target[row]])) for row in rows
        )
        files[name] = "".join(json.dumps(example) + "\n" for example in examples).encode()
    return write_files(folder, files)


def _example(row: int, values: Floats, limits: Floats, diagnosis: str) -> dict[str, Any]:
    """One chat record about the biopsy in `row`. values: [5], its measures. limits: [4, 5], between grades."""
    told = [
        f"{name} {round(value * factor)} ({GRADES[int(np.searchsorted(between, value))]})"
        for (name, factor), value, between in zip(MEASURES.values(), values.tolist(), limits.T, strict=True)
    ]
    text = ", ".join(told)
    messages = [
        {"role": "system", "content": _instruction()},
        {"role": "user", "content": text},
        {"role": "assistant", "content": json.dumps({"diagnosis": diagnosis})},
    ]
    return {"id": f"biopsy-{row:03d}", "messages": messages}


def _instruction() -> str:
    return resources.files("prefix_train").joinpath("demo", "biopsies.md").read_text(encoding="utf-8").strip()
