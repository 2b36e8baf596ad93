"""Scoring of answers by a user's metric: its rows are read one at a time, and no further than they are needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.errors import UserError
from prefix_train import evaluate
from prefix_train.dist import Ranks
from prefix_train.generate import Counts
from prefix_train.metrics import Answer, Exact, OwnMetric
from prefix_train.rows import Line

DATA = Path("data.jsonl")
RANKS = Ranks(0, 1, torch.device("cpu"), None)


class Row(dict[str, Any]):
    """A row that tells whether it is still held."""


class File:
    """Ten rows, as `rows_of` gives them. read: numbers of those that were reached. held: how many rows at each."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.held: list[int] = []
        self._given: list[weakref.ref[Row]] = []

    def __iter__(self) -> Iterator[Line]:
        for number in range(1, 11):
            self.read.append(number)
            yield Line(f"{DATA}:{number}", number, b"")

    def record(self, line: Line) -> Row:
        gc.collect()
        self.held.append(sum(row() is not None for row in self._given))
        row = Row(number=line.start)
        self._given.append(weakref.ref(row))
        return row


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> File:
    made = File()
    monkeypatch.setattr(evaluate, "rows_of", lambda path: made)
    return made


def answer(source: str, text: str = "a") -> Answer:
    return Answer("id", source, "a", text, True, 1)


def own(function: Callable[[str, dict[str, Any]], Any]) -> OwnMetric:
    return OwnMetric("own", "own.py:own", function)


def test_rows_are_held_one_at_a_time_and_no_further_than_the_last(file: File) -> None:
    sources = ("5", "2 target 2", "4", "2 target 1")  # as the tree of beginnings may have them
    mine = [(place, answer(f"{DATA}:{source}", source[0])) for place, source in enumerate(sources)]
    number = own(lambda prediction, example: example["number"])
    found = evaluate.score(mine, Counts(), [Exact(), number], DATA, RANKS)
    assert [scores["own"] for scores in found.scores] == [5, 2, 4, 2]
    assert [list(scores) for scores in found.scores] == [["exact", "own"]] * 4
    assert file.read == [1, 2, 3, 4, 5]
    assert max(file.held) <= 1, "the one before, which the loop still names"


def test_the_first_example_is_tried_without_a_look_at_the_rest(file: File) -> None:
    example: Any = SimpleNamespace(id="id", source=f"{DATA}:1 target 2", answer="a")
    with pytest.raises(UserError, match="the function gave 'row 1'"):
        evaluate.try_out([own(lambda _, example: f"row {example['number']}")], example, DATA)
    assert file.read == [1]


def test_without_a_users_metric_no_row_is_read(file: File) -> None:
    assert evaluate.score([(0, answer(f"{DATA}:7"))], Counts(), [Exact()], DATA, RANKS).metrics == {"exact": 1.0}
    assert file.read == []


def test_a_row_that_is_gone_is_named(file: File) -> None:
    with pytest.raises(UserError, match=r"^data\.jsonl:12: the row is not there any more$"):
        evaluate.score([(0, answer(f"{DATA}:12"))], Counts(), [own(lambda *_: 1)], DATA, RANKS)
