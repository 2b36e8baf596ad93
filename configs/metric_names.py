"""What `evaluate.metrics` may name: metrics that are built in, and functions of a user's own as `FILE.py:FUNCTION`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

EXACT = "exact"
JSON = "json"
BUILT_IN = (EXACT, JSON)


class Own(NamedTuple):
    """A user's metric."""

    path: str
    function: str


def own(name: str) -> Own | None:
    """File and function of a user's metric; none for one that is built in, and for what is no name of a metric."""
    path, colon, function = name.rpartition(":")
    return Own(path, function) if colon and path.endswith(".py") and function.isidentifier() else None


def label(name: str) -> str:
    """What a metric is called in results: a user's by its function."""
    found = own(name)
    return name if found is None else found.function


def absolute(name: str, folder: Path) -> str:
    """The metric with an absolute path, where it has one: relative to `folder`."""
    found = own(name)
    return name if found is None else f"{os.path.abspath(folder / found.path)}:{found.function}"


def broken(names: Sequence[str]) -> Iterator[str]:
    """What is wrong with `names`, a line each."""
    for name in names:
        if name not in BUILT_IN and own(name) is None:
            known = ", ".join(BUILT_IN)
            yield f"evaluate.metrics: {name!r} is no metric: give {known}, or a function as path/to/file.py:function"
    labels = [label(name) for name in names]
    for name, called in zip(names, labels, strict=True):
        if labels.count(called) > 1:
            yield f"evaluate.metrics: {name!r}: two metrics are called {called}: give each function a name of its own"
        if own(name) is not None and re.fullmatch("|".join(BUILT_IN), called):
            yield f"evaluate.metrics: {name!r}: {called} is built in: give the function another name"
