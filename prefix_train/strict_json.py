"""JSON in which nothing is lost or made up: no key twice, no NaN, no number that is too large. No torch."""

from __future__ import annotations

import json
import math
from typing import Any

from configs.wording import shown


def loads(text: str) -> Any:
    """The value that `text` writes. Raises ValueError, and RecursionError where it is nested too deeply."""
    return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        double = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {shown(double)} stands twice in one object; write it once")
    return values


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{shown(text)} is too large for a number; write it as a text")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value; write a number or null")
