"""The evaluations in a run folder, and some of their predictions: before, between and after training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from configs import runfolder
from configs.redact import redact_value
from prefix_train.results.records import UNREADABLE, Reader

MOST_READ = 2000
"""Predictions that are looked at for a sample."""


@dataclass(frozen=True)
class Prediction:
    """A line of `predictions.jsonl`."""

    line: int
    prediction: str
    target: str
    finish: str
    tokens: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """`evaluations/<name>/summary.json`, which may have more, under any other name."""

    update: int
    data: str
    heldout_examples: int | None = None
    heldout_loss: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    mistake: str | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation(Summary):
    """A summary, its folder's name, and some predictions: nothing that the file says of these is taken for them."""

    name: str
    predictions: tuple[Prediction, ...]


def read(reader: Reader) -> tuple[Evaluation, ...]:
    """All evaluations of a run, by update."""
    folder = reader.run / runfolder.EVALUATIONS
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    except FileNotFoundError:
        return ()
    except OSError as error:
        reader.missing.append(f"{runfolder.EVALUATIONS} cannot be read: {error.strerror}")
        return ()
    found = []
    for name in names:
        place = f"{runfolder.EVALUATIONS}/{name}"
        one = reader.json(f"{place}/summary.json", Summary, f"{place}/summary.json: not there")
        if one is not None:
            predictions = _predictions(reader, f"{place}/predictions.jsonl")
            found.append(Evaluation(**vars(one), name=name, predictions=predictions))
    return tuple(sorted(found, key=lambda one: (one.update, one.name)))


def _predictions(reader: Reader, name: str) -> tuple[Prediction, ...]:
    """The first of a file, without secrets; those that are damaged are not there."""
    found = []
    try:
        with (reader.run / name).open("rb") as stream:
            for number, line in enumerate(islice(stream, MOST_READ), 1):
                try:
                    found.append(msgspec.convert(redact_value(msgspec.json.decode(line)), Prediction))
                except UNREADABLE as error:
                    reader.missing.append(f"{name}: line {number} is damaged: {error}")
                    return tuple(found)
    except FileNotFoundError:
        return ()
    except OSError as error:
        reader.missing.append(f"{name} cannot be read: {error.strerror}")
    return tuple(found)
