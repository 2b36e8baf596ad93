"""Scores of answers: letter by letter, JSON field by field, and by functions that a user writes. No torch here.

A metric gives each answer a score, which stands in the predictions, and all scores together a summary, which stands in
the result. A user's function runs from the copy in the run folder whose hash was written down when it was made.
"""

from __future__ import annotations

import ast
import decimal
import hashlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from decimal import Decimal
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from configs import metric_names, runfolder
from configs.errors import UserError

SOURCES = "sources.json"
MOST_LETTERS = 200
"""Of what a user's function raised."""


@dataclass(frozen=True)
class Answer:
    """What the model answered to one held-out example. text: without the end token. complete: an end token came.

    source: `file:line`. expected: the target's text. tokens: generated, the end token included.
    """

    id: str
    source: str
    expected: str
    text: str
    complete: bool
    tokens: int


class Metric(Protocol):
    """name: what it is called in results."""

    @property
    def name(self) -> str: ...
    def score(self, answer: Answer, row: Mapping[str, Any]) -> Any:
        """The score of one answer, as JSON holds it; row: the example as its file has it. None: not for this one."""

    def summary(self, scores: Sequence[Any]) -> Any:
        """Of all scores that are not None, at least one."""


@dataclass(frozen=True)
class Exact:
    """1 where the answer is the expected one letter by letter and has ended, else 0; their mean."""

    name: str = metric_names.EXACT

    def score(self, answer: Answer, row: Mapping[str, Any]) -> float:
        return float(answer.complete and answer.text == answer.expected)

    def summary(self, scores: Sequence[float]) -> float:
        return fmean(scores)


@dataclass(frozen=True)
class JsonFields:
    """JSON objects field by field; answers whose target is no JSON object are not scored.

    A field is a value that is no object, or an empty one, named by the keys that lead to it: `person.age`. Right is a
    field that the answer has with an equal value: numbers of equal value (`1`, `1.0` and `10e-1`), text letter by
    letter, true, false and null themselves, lists of equal length with equal elements in order. An answer is valid if
    all of it is one JSON object: no text around it, no key twice, no NaN. One that is not has no field right.
    """

    name: str = metric_names.JSON

    def score(self, answer: Answer, row: Mapping[str, Any]) -> dict[str, Any] | None:
        expected, given = json_object(answer.expected), json_object(answer.text)
        if expected is None:
            return None
        wanted, found = fields(expected), fields(given or {})
        return {
            "valid": given is not None,
            "right": {name: name in found and equal(found[name], value) for name, value in wanted.items()},
            "missing": [name for name in wanted if name not in found],
            "extra": [name for name in found if name not in wanted],
        }

    def summary(self, scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        by_field: dict[str, list[bool]] = {}
        for score in scores:
            for name, right in score["right"].items():
                by_field.setdefault(name, []).append(right)
        every = [right for rights in by_field.values() for right in rights]
        return {
            "examples": len(scores),
            "valid": fmean(score["valid"] for score in scores),
            "right": fmean(every) if every else 1.0,
            "missing": sum(len(score["missing"]) for score in scores),
            "extra": sum(len(score["extra"]) for score in scores),
            "fields": {name: fmean(rights) for name, rights in by_field.items()},
        }


@dataclass(frozen=True)
class OwnMetric:
    """A user's function of (prediction, example): a finite number, or a dict of them with the same keys always.

    where: `file.py:function`, for messages.
    """

    name: str
    where: str
    function: Callable[[str, dict[str, Any]], Any]

    def score(self, answer: Answer, row: Mapping[str, Any]) -> float | dict[str, float]:
        """Raises UserError, naming function and example, for whatever goes wrong in the function or with its value."""
        what = f"evaluate.metrics: {self.where}: {answer.source}"
        try:
            example = deepcopy({**row, "source": answer.source, "target": answer.expected})
            return _numbers(self.function(answer.text, example))
        except _NoNumbers as error:
            raise UserError(f"{what}: the function gave {error}") from error
        except (Exception, SystemExit) as error:  # the function is the user's, and so is what it gives: anything
            raise UserError(f"{what}: the function raised {_raised(error)}") from error

    def summary(self, scores: Sequence[float | dict[str, float]]) -> float | dict[str, float]:
        """Means. Raises UserError where scores have different keys, or a sum is too large for a number."""
        kinds = {tuple(sorted(score)) if isinstance(score, dict) else None for score in scores}
        if len(kinds) > 1:
            raise UserError(f"evaluate.metrics: {self.where}: the function gave different keys for different examples")
        numbers = [score if isinstance(score, dict) else {"": score} for score in scores]
        try:
            means = {key: fmean(one[key] for one in numbers) for key in numbers[0]}
        except OverflowError as error:
            raise UserError(f"evaluate.metrics: {self.where}: the numbers are too large to have a mean") from error
        return means if isinstance(scores[0], dict) else means[""]


class _NoNumbers(Exception):
    """What a function gave, and what to give instead."""


def _numbers(value: Any) -> float | dict[str, float]:
    """What a user's function gave, as plain numbers. Raises _NoNumbers, and whatever objects of the user's raise."""
    if not isinstance(value, dict):
        return _number(value, "")
    if not value or not all(isinstance(key, str) and _is_text(key) for key in value):
        raise _NoNumbers(f"{_shown(value)}: give a number, or a dict of numbers by name")
    return {str(key): _number(one, f" for {key!r}") for key, one in value.items()}


def _number(value: Any, place: str) -> float:
    try:
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an int that no float holds
        pass
    raise _NoNumbers(f"{_shown(value)}{place}: give a finite number")


def json_object(text: str) -> dict[str, Any] | None:
    """The JSON object that all of `text` is, its numbers as Decimal; none where it is none."""
    try:
        value = json.loads(
            text, parse_float=Decimal, parse_int=Decimal, parse_constant=_refuse, object_pairs_hook=_unique
        )
    except (ValueError, decimal.InvalidOperation, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def fields(value: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """The fields of a JSON object by dotted name; a key that has a dot or a quote itself is written in quotes."""
    found: dict[str, Any] = {}
    for key, one in value.items():
        name = above + (json.dumps(key, ensure_ascii=False) if not key or set('."') & set(key) else key)
        if isinstance(one, dict) and one:
            found |= fields(one, f"{name}.")
        else:
            found[name] = one
    return found


def equal(left: Any, right: Any) -> bool:
    """Whether two JSON values of `json_object` are equal; true is no number."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return type(left) is type(right) and bool(left == right)


def check(names: Sequence[str]) -> None:
    """Raise UserError where a user's metric has no file or no such function. Nothing of the file is run."""
    for name in names:
        if (found := metric_names.own(name)) is None:
            continue
        tree = _parse(Path(found.path), name)
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        if (function := functions.get(found.function)) is None:
            has = f"it has {', '.join(functions)}" if functions else "it has none"
            raise UserError(f"evaluate.metrics: {name}: no function {found.function} at the top of the file; {has}")
        if not function.decorator_list and not _takes_two(function.args):
            raise UserError(f"evaluate.metrics: {name}: {_signature(found.function)}")


def freeze(folder: Path, names: Sequence[str]) -> None:
    """Copy the files of users' metrics into `folder`, with their hashes in `sources.json`. Raises UserError."""
    check(names)
    paths = dict.fromkeys(found.path for name in names if (found := metric_names.own(name)))
    sources = {}
    for number, path in enumerate(paths):
        content = Path(path).read_bytes()
        copy = f"{number}-{Path(path).name}"
        runfolder.write_aside(folder / copy, lambda stream, content=content: stream.write(content))  # type: ignore[misc]
        sources[path] = {"file": copy, "sha256": hashlib.sha256(content).hexdigest()}
    if sources:
        runfolder.write_json(folder / SOURCES, sources)


def load(folder: Path, names: Sequence[str]) -> list[Metric]:
    """The metrics of these names, users' from the copies in `folder`. Raises UserError."""
    built_in: dict[str, Metric] = {metric_names.EXACT: Exact(), metric_names.JSON: JsonFields()}
    return [built_in[name] if name in built_in else _own(folder, name) for name in names]


def check_targets(metrics: Sequence[Metric], targets: Sequence[str], file: str) -> None:
    """Raise UserError where a metric could score none of these."""
    if any(isinstance(metric, JsonFields) for metric in metrics) and all(json_object(text) is None for text in targets):
        raise UserError(f"evaluate.metrics: json: no target in {file} is a JSON object; leave json out")


def _own(folder: Path, name: str) -> OwnMetric:
    found = metric_names.own(name)
    assert found is not None
    sources = runfolder.read_json(folder / SOURCES) if (folder / SOURCES).is_file() else {}
    if found.path not in sources:
        raise UserError(f"evaluate.metrics: {name}: {folder} has no copy of it: `python -m slurm.submit` makes one")
    copy, sha256 = folder / sources[found.path]["file"], sources[found.path]["sha256"]
    content = copy.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"evaluate.metrics: {name}: {copy} is no longer what it was when the run was made")
    module = _import(copy, content, f"metric_{sha256[:16]}", name)
    function = getattr(module, found.function, None)
    if not callable(function):
        raise UserError(f"evaluate.metrics: {name}: no function {found.function} at the top of the file")
    try:
        inspect.signature(function).bind("", {})
    except (TypeError, ValueError) as error:
        raise UserError(f"evaluate.metrics: {name}: {_signature(found.function)}") from error
    return OwnMetric(found.function, name, function)


class _Loader(SourceFileLoader):
    """Reads no file, compiled or not, and writes none: what runs is what was hashed."""

    def __init__(self, module_name: str, path: Path, content: bytes) -> None:
        super().__init__(module_name, str(path))
        self._content = content

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self._content, self.path)


def _import(path: Path, content: bytes, module_name: str, name: str) -> Any:
    loader = _Loader(module_name, path, content)
    spec = spec_from_loader(module_name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look themselves up there
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:  # so is the file
        advice = "; a metric's file stands alone, beside installed packages" if isinstance(error, ImportError) else ""
        raise UserError(f"evaluate.metrics: {name}: the file cannot be run: {_raised(error)}{advice}") from error
    return module


def _parse(path: Path, name: str) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"evaluate.metrics: {name}: {path} cannot be read: {os.strerror(error.errno or 0)}") from error
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(f"evaluate.metrics: {name}: {path}{line} is not Python: {error.args[0]}") from error


def _takes_two(arguments: ast.arguments) -> bool:
    """Whether a function may be called with two values."""
    positional = [*arguments.posonlyargs, *arguments.args]
    enough = len(positional) >= 2 or arguments.vararg is not None
    return enough and len(positional) - len(arguments.defaults) <= 2 and None not in arguments.kw_defaults


def _signature(function: str) -> str:
    return f"{function} must take two values: def {function}(prediction: str, example: dict)"


def _shown(value: Any) -> str:
    """A user's value, or where it cannot be shown its type."""
    return _text(lambda: repr(value), f"something of type {type(value).__name__}")


def _raised(error: BaseException) -> str:
    kind = type(error).__name__
    return _text(lambda: f"{kind}: {error}", kind)


def _text(write: Callable[[], str], otherwise: str) -> str:
    """What `write` gives, as text that a file can hold; `otherwise` where an object of the user's raises in it."""
    try:
        text = write()[:MOST_LETTERS]
    except (Exception, SystemExit):  # noqa: BLE001  an object of the user's may raise anything
        return otherwise
    return text.encode(errors="backslashreplace").decode()


def _is_text(key: str) -> bool:
    """Whether a file can hold `key`: half a surrogate pair it cannot."""
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return dict(pairs)
