"""Writes the site's reference pages from the source itself: options, commands, the library. A hook of mkdocs.

Nothing here is told twice: an option's type, default and meaning are those of configs/schema.py, its range that of
configs/rules.py; a command's arguments are those that it is parsed with.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import griffe
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import prefix_train
from configs import compose, rules
from configs.schema import Config

ROOT = Path(__file__).parents[1]

COMMANDS = {
    "prefix-train": "prefix_train.cli",
    "python -m slurm.submit": "slurm.submit",
    "python -m slurm.status": "slurm.status",
    "python -m slurm.diagnose": "slurm.diagnose",
    "python -m preflight": "preflight.__main__",
}
"""Programs that people start, and the module with the application of each."""

BY_THE_JOB = ("slurm.finish", "slurm.life", "slurm.local", "slurm.presence", "slurm.watch")
"""Modules with an application that the job calls."""

TYPES = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "`true` or `false`",
    list[str]: "list of texts",
    dict[str, str]: "mapping of texts",
    dict[str, Any]: "mapping",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are written here to those of docs/guides."""
    pages = {
        "reference/options.md": options_page(),
        "reference/commands.md": commands_page(),
        "reference/library.md": library_page(),
        "changes.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


# Options.


def options_page() -> str:
    """Every option of configs/schema.py in a table per section, each with an anchor of its dotted name."""
    schema = griffe.load("configs.schema", search_paths=[str(ROOT)])
    lines = [
        "# Options",
        "",
        "An option is written below its section in YAML, or as `section.option=value` on the command line. An unknown "
        "one is an error that names the nearest known one.",
        "",
        *_section("The run", "", Config, schema["Config"]),
    ]
    for field in dataclasses.fields(Config):
        kind = type(getattr(Config(), field.name))
        if dataclasses.is_dataclass(kind):
            lines += _section(f"`{field.name}`", f"{field.name}.", kind, schema[kind.__name__])
    return "\n".join(lines) + "\n"


def _section(title: str, prefix: str, section: type, documented: griffe.Object) -> list[str]:
    defaults, types = section(), compose.options()
    lines = [f"## {title}", "", _flat(documented), "", *_head("option", "value", "default", "meaning")]
    for field in dataclasses.fields(section):
        key = f"{prefix}{field.name}"
        if key in types:
            default = _as_yaml(getattr(defaults, field.name))
            anchored = f"`{key}`{{ #{key} }}"
            meaning = _cell(_flat(documented[field.name]))
            lines.append(f"| {anchored} | {_cell(_value(key, types[key]))} | `{default}` | {meaning} |")
    return [*lines, ""]


def _value(key: str, kind: Any) -> str:
    """What may stand there, in words."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    (given,) = (part for part in parts if part is not type(None))
    if get_origin(given) is Literal:
        words = ", ".join(f"`{choice}`" for choice in get_args(given))
    else:
        words = ", ".join([TYPES[given], *_bounds(key)])
    return words + (", or none" if type(None) in parts else "")


def _bounds(key: str) -> Iterator[str]:
    if key in rules.AT_LEAST:
        yield f"{rules.AT_LEAST[key]:,} or more"
    if key in rules.ABOVE_ZERO:
        yield "above 0"
    if key in rules.AT_MOST:
        yield f"{rules.AT_MOST[key]:,} or less"
    if key in rules.FRACTIONS:
        yield "from 0 up to, not including, 1"


def _as_yaml(value: Any) -> str:
    """A default as a configuration would write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_as_yaml, value))}]"
    return str(value) if value != "" else '""'


# Commands.


def commands_page() -> str:
    """Every command with the help that it prints, argument by argument."""
    lines = [
        "# Commands",
        "",
        "Exit status 0 means that what was asked holds, 2 that you can fix it (one line says what is wrong, where, and "
        "what to write instead), 1 anything else. Every command has `--help`.",
        "",
    ]
    for program, module in COMMANDS.items():
        lines += _command(program, command(module), 2)
    return "\n".join(lines) + "\n"


def command(module: str) -> Any:
    """The command that a module's typer application is; `commands` of a group are those below it."""
    return typer.main.get_command(importlib.import_module(module).app)


def _command(name: str, found: Any, level: int) -> list[str]:
    lines = [f"{'#' * level} `{name}`", "", _cell(_escaped(found.help or "")), ""]
    if below := getattr(found, "commands", None):
        return lines + [line for word, one in below.items() for line in _command(f"{name} {word}", one, level + 1)]
    context = found.make_context(name, [], resilient_parsing=True)
    lines += [f"`{' '.join([name, *found.collect_usage_pieces(context)])}`", "", *_head("argument", "meaning")]
    records = [record for one in found.params if (record := one.get_help_record(context))]
    return [*lines, *(f"| `{_cell(what)}` | {_cell(_escaped(meaning))} |" for what, meaning in records), ""]


# The library.


def library_page() -> str:
    """The public names of `prefix_train`; mkdocstrings fills in their docstrings."""
    lines = ["# Library", "", _escaped(prefix_train.__doc__ or ""), ""]
    return "\n".join([*lines, *(f"::: prefix_train.{name}\n" for name in prefix_train.__all__)])


def _flat(documented: griffe.Object | griffe.Alias) -> str:
    """A docstring as one paragraph. ValueError where there is none."""
    if documented.docstring is None:
        raise ValueError(f"{documented.path} has no docstring: say what it means")
    return _escaped(" ".join(documented.docstring.value.split()))


def _escaped(text: str) -> str:
    """Text in which Markdown sees no emphasis or HTML; what stands in backticks is left alone."""
    parts = text.split("`")
    parts[::2] = [part.replace("*", r"\*").replace("_", r"\_").replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def _head(*columns: str) -> list[str]:
    """The first two lines of a table."""
    return [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]


def _cell(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(text.split()).replace("|", r"\|")
