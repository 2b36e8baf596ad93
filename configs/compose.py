"""From YAML and `key=value` to one frozen Config; text keeps the user's letters.

YAML is read as text with line numbers, and only the declared type of an option says what the text means: a `str`
stays letter by letter (`007`, `on`, `1e3`, `1:30:00`), everything else is converted and checked by OmegaConf. Values
inside `model.build`, which declares no types, are read as YAML 1.2 reads them. `${...}` is text, not interpolation;
`???` marks a value that must still be given.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs import other_names, rules, runfolder
from configs.errors import UserError
from configs.schema import Config

NULLS = frozenset({"null", "Null", "NULL", "none", "None", "~"})
"""Unquoted spellings of "no value", for options that may have none."""

_YAML12_NUMBERS = (
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+"), lambda text: int(text, 0)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
)
_YAML12_WORDS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False, "": None}

WANTED: dict[type, str] = {
    int: "a whole number: write digits, as in 100",
    float: "a number: write one, as in 0.5 or 1e-4",
    bool: "a switch: write true or false",
}


class _Dumper(yaml.SafeDumper):
    """Escapes every letter that cannot be printed; PyYAML alone turns U+0085 into a space on the way back.

    Quotes what would be read as another value than text, as `1E5` or `none`: PyYAML knows YAML 1.1 only.
    """


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    other = text in NULLS or any(pattern.fullmatch(text) for pattern, _ in _YAML12_NUMBERS)
    style = None if text.isprintable() and not other else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


class Setting(NamedTuple):
    """One value for one option, as the user wrote it, and where."""

    key: str
    node: yaml.Node
    where: str


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read the YAML file `path`, apply `key=value` overrides in order, check the rules of configs/rules.py.

    Raises UserError that names file and line, or the override, for unknown keys, wrong values and broken rules.
    """
    return _compose([*_read_file(path), *_read_overrides(overrides)], source=str(path))


def from_run(run: Path) -> Config:
    """The resolved configuration that run folder `run` was made with."""
    path = run / runfolder.CONFIG
    if not path.is_file():
        raise UserError(f"{run} is not a run folder: it has no {runfolder.CONFIG}")
    return load(path)


def with_changes(config: Config, overrides: Sequence[str]) -> Config:
    """`config` with `key=value` overrides, checked again."""
    settings = [*_read_text(to_yaml(config), "config"), *_read_overrides(overrides)]
    return _compose(settings, source="the configuration")


def to_yaml(config: Config) -> str:
    """All options of `config` as YAML that `load` reads back to an equal Config."""
    return str(yaml.dump(dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120))


@cache
def options() -> Mapping[str, Any]:
    """Declared type of every option by its dotted name, in the schema's order."""
    return MappingProxyType(dict(_fields(Config, "")))


def _compose(settings: Iterable[Setting], source: str) -> Config:
    merged = OmegaConf.structured(Config)
    _unlock(merged)
    types = options()
    for setting in settings:
        key, inside = _find(setting, types)
        value = _convert(setting, types[key], inside)
        try:
            OmegaConf.update(merged, setting.key, value, merge=False)
        except OmegaConfBaseException as error:
            raise UserError(f"{setting.where}: {setting.key}: {_no_such(value, types[key], error)}") from error
    if missing := sorted(OmegaConf.missing_keys(merged)):
        raise UserError(f"{source}: no value yet for {', '.join(missing)}: write {missing[0]}=VALUE")
    config = OmegaConf.to_object(merged)
    assert isinstance(config, Config)
    rules.check(config, source)
    return config


def _no_such(value: Any, kind: Any, error: OmegaConfBaseException) -> str:
    """Why `value` is none of an option of type `kind`, and what is."""
    wanted = next((words for part, words in WANTED.items() if part in (kind, *get_args(kind))), None)
    if wanted is None or not isinstance(value, str):
        return str(error).splitlines()[0]
    return f"{value!r} is not {wanted}"


def _unlock(node: DictConfig) -> None:
    """Frozen dataclasses come out read-only; composing still has to write."""
    OmegaConf.set_readonly(node, False)
    for name in node:
        child = node._get_node(name)
        if isinstance(child, DictConfig):
            _unlock(child)


def _fields(section: type, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, kind in get_type_hints(section).items():
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            yield from _fields(kind, f"{prefix}{name}.")
        else:
            yield prefix + name, kind


# Reading: everything is a YAML node, so that a value knows whether it was quoted.


def _read_file(path: Path) -> list[Setting]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}") from error
    return _read_text(text, str(path))


def _read_text(text: str, source: str) -> list[Setting]:
    root = _parse(text, source)
    if root is None or (isinstance(root, yaml.ScalarNode) and not root.value):
        return []
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{source}:{_line(root)}: expected `section:` with options below it")
    return list(_settings(root, "", source, options()))


def _settings(node: yaml.MappingNode, prefix: str, source: str, types: Mapping[str, Any]) -> Iterator[Setting]:
    for name, value, line in _items(node, source):
        key, where = prefix + name, f"{source}:{line}"
        inner = [option for option in types if option.startswith(key + ".")]
        if inner and isinstance(value, yaml.MappingNode):
            yield from _settings(value, key + ".", source, types)
        elif inner and not (isinstance(value, yaml.ScalarNode) and _is_null(value)):
            raise UserError(f"{where}: {key} is a section: write options such as {inner[0]} below it")
        elif not inner:
            yield Setting(key, value, where)


def _items(node: yaml.MappingNode, where: str) -> Iterator[tuple[str, yaml.Node, int]]:
    seen: set[str] = set()
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode):
            raise UserError(f"{where}: the key in line {_line(name)} is not text")
        if name.value in seen:
            raise UserError(f"{where}: {name.value} is given twice, again in line {_line(name)}")
        seen.add(name.value)
        yield name.value, value, _line(name)


def _read_overrides(overrides: Sequence[str]) -> Iterator[Setting]:
    for override in overrides:
        key, equals, text = override.partition("=")
        where = f"argument `{override}`"
        if not equals:
            raise UserError(f"{where}: expected key=value")
        yield Setting(key.strip(), yaml.ScalarNode("", text), where)


def _parse(text: str, source: str) -> yaml.Node | None:
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{source}{line}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{source}: not YAML: {error}") from error
    except RecursionError:
        raise UserError(f"{source}: nested too deeply") from None
    return node


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


# Meaning: the declared type decides.


def _find(setting: Setting, types: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The option that `setting` addresses, and the path inside it where that option is a dict."""
    if setting.key in types:
        return setting.key, []
    for key, kind in types.items():
        if get_origin(kind) is dict and setting.key.startswith(key + "."):
            return key, setting.key[len(key) + 1 :].split(".")
    inner = [key for key in types if key.startswith(setting.key + ".")]
    if inner:
        raise UserError(f"{setting.where}: {setting.key} is a section: write an option such as {inner[0]}")
    raise UserError(f"{setting.where}: unknown key {setting.key}; {other_names.nearest(setting.key, list(types))}")


def _convert(setting: Setting, kind: Any, inside: list[str]) -> Any:
    """The value of `setting` for an option of type `kind`, as OmegaConf takes it."""
    node, where = setting.node, f"{setting.where}: {setting.key}"
    if isinstance(node, yaml.ScalarNode) and node.value == "???" and node.style is None:
        return "???"
    if get_origin(kind) in (Union, UnionType):
        if isinstance(node, yaml.ScalarNode) and _is_null(node):
            return None
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is dict:
        free = get_args(kind)[1] is Any
        if inside:
            if not free and len(inside) > 1:
                raise UserError(f"{where}: no name within it can have a dot")
            return _escape(_natural(_flow(node, where), where) if free else _text(node, where))
        return _dictionary(_flow(node, where), where, free)
    if get_origin(kind) is list:
        return _list(_flow(node, where), where)
    text = _text(node, where)
    if get_origin(kind) is Literal and text not in get_args(kind):
        raise UserError(f"{where}: {text!r} is not one of {', '.join(get_args(kind))}")
    if kind is float and not _may_be_finite(text):
        raise UserError(f"{where}: {text!r} is not a finite number")
    return _escape(text)


def _may_be_finite(text: str) -> bool:
    """False for nan, inf and what is too large for a float; what is no number at all is left to OmegaConf."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return True


def _flow(node: yaml.Node, where: str) -> yaml.Node:
    """`[a, b]` and `{a: b}` in an override, which arrive as text, as YAML in a file would have been read."""
    if isinstance(node, yaml.ScalarNode) and node.style is None and node.value.startswith(("[", "{")):
        return _parse(node.value, where) or node
    return node


def _text(node: yaml.Node, where: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise UserError(f"{where}: expected one value, not a list or a mapping")
    text = str(node.value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: {text!r} is not UTF-8 at character {error.start + 1}") from error
    return text


def _list(node: yaml.Node, where: str) -> list[str]:
    if isinstance(node, yaml.SequenceNode):
        return [_escape(_text(item, where)) for item in node.value]
    parts = [part.strip() for part in _text(node, where).split(",")]
    return [_escape(part) for part in parts] if parts != [""] else []


def _dictionary(node: yaml.Node, where: str, free: bool) -> dict[str, Any]:
    if isinstance(node, yaml.ScalarNode) and _is_null(node):
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{where}: expected a mapping, as in {{key: value}}")
    return {
        name: _escape(_natural(value, where) if free else _text(value, where)) for name, value, _ in _items(node, where)
    }


def _natural(node: yaml.Node, where: str, above: tuple[yaml.Node, ...] = ()) -> Any:
    """The value of `node` as YAML 1.2's core schema has it: quoted text is text."""
    if node in above:
        raise UserError(f"{where}: a value contains itself")
    if isinstance(node, yaml.SequenceNode):
        return [_natural(item, where, (*above, node)) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        items = _items(node, where)
        return {name: _natural(value, where, (*above, node)) for name, value, _ in items}
    text = _text(node, where)
    if node.style is not None:
        return text
    if text in _YAML12_WORDS or text in ("null", "Null", "NULL", "~"):
        return _YAML12_WORDS.get(text)
    for pattern, convert in _YAML12_NUMBERS:
        if pattern.fullmatch(text):
            return convert(text)
    return text


def _is_null(node: yaml.ScalarNode) -> bool:
    return node.style is None and (node.value in NULLS or not node.value)


def _escape(value: Any) -> Any:
    """Text in which OmegaConf sees no interpolation, at any depth of `value`."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, list):
        return [_escape(item) for item in value]
    if isinstance(value, dict):
        return {name: _escape(item) for name, item in value.items()}
    return value
