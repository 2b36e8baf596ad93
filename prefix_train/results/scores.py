"""Evaluations and some of their predictions as tables. Text in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from configs import metric_names
from configs.redact import redact
from prefix_train.results.charts import number
from prefix_train.results.evaluations import MOST_READ, Evaluation, Prediction
from prefix_train.results.tables import NONE, Table, cut

SAMPLE = 8
"""Predictions that are shown; three quarters of them wrong ones, where there are so many."""
MOST_LETTERS = 300
"""Of a prediction or a target."""


def table(found: Sequence[Evaluation]) -> Table | None:
    """An evaluation a row, a metric a column."""
    if not found:
        return None
    scores = [figures(one.metrics) for one in found]
    names = list(dict.fromkeys(name for one in scores for name in one))
    rows = [
        (
            redact(one.name),
            str(one.update),
            redact(PurePath(one.data).name),
            NONE if one.heldout_examples is None else f"{one.heldout_examples:,}",
            NONE if one.heldout_loss is None else number(one.heldout_loss),
            *(told.get(name, NONE) for name in names),
            *((one.mistake or "",) if any(other.mistake for other in found) else ()),
        )
        for one, told in zip(found, scores, strict=True)
    ]
    mistakes = ("failed",) if any(one.mistake for one in found) else ()
    head = ("evaluation", "after update", "data", "examples", "loss", *names, *mistakes)
    return cut(Table("Held-out examples", head, tuple(rows)))


def sample(found: Sequence[Evaluation]) -> Table | None:
    """Some predictions of the latest evaluation, of several of them the run's own, wrong ones first."""
    answered = [one for one in found if one.predictions]
    if not answered:
        return None
    last = max(answered, key=lambda one: (one.update, -len(one.name)))  # of later ones it is the name's beginning
    wrong = [one for one in last.predictions if not _right(one)]
    right = [one for one in last.predictions if _right(one)]
    chosen = wrong[: max(SAMPLE * 3 // 4, SAMPLE - len(right))]
    chosen += right[: SAMPLE - len(chosen)]
    rows = [
        (
            str(one.line),
            _short(one.target),
            _short(one.prediction) + ("" if one.finish == "stop" else " … (cut: evaluate.max_new_tokens)"),
            "; ".join(f"{name} {told}" for name, told in figures(one.metrics).items()),
            NONE if one.loss is None else number(one.loss),
        )
        for one in chosen
    ]
    looked = f"first {len(last.predictions):,}" if len(last.predictions) == MOST_READ else f"{len(last.predictions):,}"
    caption = f"Some predictions of {last.name}: {len(wrong):,} of the {looked} are not the target"
    return Table(redact(caption), ("line", "target", "prediction", "metrics", "loss"), tuple(rows))


def figures(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Scores or means by name, as text; those of several values by dotted name."""
    told: dict[str, str] = {}
    for name, value in metrics.items():
        if name == metric_names.JSON and isinstance(value, Mapping):
            told |= _json(value)
        elif isinstance(value, Mapping):
            told |= {f"{name}.{key}": number(one) for key, one in value.items() if isinstance(one, int | float)}
        elif isinstance(value, int | float):
            told[name] = f"{value:.1%}" if name == metric_names.EXACT else number(value)
    return told


def _json(value: Mapping[str, Any]) -> dict[str, str]:
    """Of all answers their shares; of one answer how many fields are right."""
    right = value.get("right")
    if isinstance(right, Mapping):
        said = f"{sum(map(bool, right.values()))} of {len(right)} fields" if value.get("valid") else "not valid"
        return {metric_names.JSON: said}
    shares = {
        f"{metric_names.JSON} {name}": f"{one:.1%}"
        for name in ("valid", "right")
        if isinstance(one := value.get(name), int | float)
    }
    fields = value.get("fields")
    if isinstance(fields, Mapping):
        shares |= {f"{name} right": f"{one:.1%}" for name, one in fields.items() if isinstance(one, int | float)}
    return shares


def _right(one: Prediction) -> bool:
    return one.finish == "stop" and one.prediction == one.target


def _short(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} … ({len(text):,} letters)"
