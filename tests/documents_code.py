"""What stands in the blocks of code of the documentation, by language. A line per fault, as in `documents`."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import ClusterConfig

from configs import compose
from configs.errors import UserError
from configs.schema import PreflightConfig
from prefix_train import prompts
from prefix_train.data import read_jsonl
from preflight import report
from preflight.judge import judge
from preflight.packages import judge_package
from preflight.states import Finding, NodeReport
from tests.documents import Block, wrong_line
from tests.hangs import cases

NOT_RUN = "not run:"
"""Note of a Python block that is only looked at: what it needs that a test cannot have stands behind it."""


FSDP_BY_ACCELERATE = frozenset({"fsdp_version", "fsdp_transformer_layer_cls_to_wrap", "fsdp_cpu_ram_efficient_loading"})
"""Of these options Accelerate has other names for its plugin, or none."""


def wrong_block(block: Block) -> list[str]:
    """What is wrong with `block`, whatever its language; shell lines are looked at by `documents.wrong_commands`."""
    if block.language not in CHECKS:
        return [f"{block.where}: no test knows the language {block.language or 'of a block without one'}"]
    faults = CHECKS[block.language](block)
    return [f"{block.where}: {fault}" for fault in faults]


def wrong_yaml(block: Block) -> Iterator[str]:
    """A configuration loads; of a part of one every option exists and has a value of its type.

    One with `distributed_type` is Accelerate's, and is read by it.
    """
    if "distributed_type" in block.text:
        yield from _wrong_for_accelerate(block)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shown.yaml")
        path.write_text(block.text, encoding="utf-8")
        try:
            compose.load(path)
        except UserError as error:
            told = str(error).removeprefix(str(path))
            own = re.match(r":\d+: |: not YAML", told) is not None
            if own or {"model", "data"} <= {*yaml.safe_load(block.text)}:
                yield f"yaml{told}"


def _wrong_for_accelerate(block: Block) -> Iterator[str]:
    try:
        given = yaml.safe_load(block.text)
    except yaml.YAMLError as error:
        yield f"no YAML: {error}"
        return
    plugin = {f"fsdp_{name}" for name in inspect.signature(FullyShardedDataParallelPlugin).parameters}
    known = {one.name for one in fields(ClusterConfig)}
    unknown = {*given} - known | {*given.get("fsdp_config", {})} - plugin - FSDP_BY_ACCELERATE
    yield from (f"Accelerate has no option {name}" for name in sorted(unknown))


def wrong_json(block: Block) -> Iterator[str]:
    """JSON that can be read; rows with messages are examples of the product's own reader."""
    lines = block.text.splitlines() if block.language == "jsonl" else [block.text]
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError as error:
            yield f"no JSON: {error}"
            continue
        if isinstance(found, dict) and {"messages", "input"} & {*found}:
            yield from _wrong_row(found)


def _wrong_row(row: dict[str, Any]) -> Iterator[str]:
    """A chat row, or with `input` an item of a folder of prompts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, prompts.ITEMS if "input" in row else "shown.jsonl")
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
        try:
            if "input" in row:
                Path(folder, prompts.SYSTEM[0]).write_text("Instructions.", encoding="utf-8")
                items = prompts.Prompts(Path(folder))
                list(map(items.record, items))
            else:
                list(read_jsonl(path))
        except UserError as error:
            yield str(error).removeprefix(str(path))


# Python.


def wrong_python(block: Block) -> Iterator[str]:
    """It compiles; what it imports exists; keywords of what it imports are keywords there."""
    try:
        tree = ast.parse(block.text)
    except SyntaxError as error:
        yield f"line {error.lineno}: {error.msg}"
        return
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _import(node, names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (called := _called(node.func, names)) is not None:
            yield from _wrong_keywords(node, called)


def _import(node: ast.Import | ast.ImportFrom, names: dict[str, Any]) -> Iterator[str]:
    for alias in node.names:
        module = alias.name if isinstance(node, ast.Import) else str(node.module)
        try:
            found: Any = importlib.import_module(module)
            if isinstance(node, ast.ImportFrom):
                found = _member(found, alias.name)
        except (ImportError, AttributeError) as error:
            yield f"line {node.lineno}: {error}"
            continue
        names[alias.asname or alias.name] = found


def _member(module: ModuleType, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        return importlib.import_module(f"{module.__name__}.{name}")


def _called(node: ast.expr, names: dict[str, Any]) -> Any:
    """What a name or a dotted name of something imported stands for; None where that is not known."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := _called(node.value, names)) is not None:
        return getattr(owner, node.attr, None)
    return None


def _wrong_keywords(node: ast.Call, called: Any) -> Iterator[str]:
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):
        return
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in parameters:
            yield f"line {node.lineno}: {ast.unparse(node.func)} takes no {keyword.arg}"


class Smaller(ast.NodeTransformer):
    """Numbers of a large example become those of a small one."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self._numbers = numbers

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, int) and not isinstance(node.value, bool):
            return ast.copy_location(ast.Constant(self._numbers.get(node.value, node.value)), node)
        return node


def execute(blocks: Iterable[Block], namespace: dict[str, Any], numbers: dict[int, int]) -> None:
    """Run a page's Python blocks one after the other; an error says which block it came from."""
    for block in blocks:
        tree = Smaller(numbers).visit(ast.parse(block.text))
        exec(compile(ast.fix_missing_locations(tree), block.where, "exec"), namespace)  # noqa: S102


# What commands print.


def wrong_text(block: Block) -> Iterator[str]:
    """What is shown as printed is what is printed: a note before the block says by what.

    `verdict NAME`: the first lines of the verdict on a case in tests/hangs/corpus. `preflight NAME`: the first lines of
    a report in REPORTS. `from: COMMAND`: from a run of a command, which must be one; its figures are that run's.
    """
    kind, _, rest = block.note.partition(" ")
    if kind == "verdict":
        said = cases.read(cases.CORPUS / rest).judge().text() if (cases.CORPUS / rest).is_dir() else ""
    elif kind == "preflight":
        said = report.text(judge(*REPORTS[rest]())) if rest in REPORTS else ""
    elif kind == "from:":
        yield from wrong_line(rest)
        return
    else:
        yield "a comment before it has to say what printed it"
        return
    if not block.text.strip() or not said.startswith(block.text):
        yield f"{block.note} says now:\n{said}"


def _five_fit_one_odd_one_silent() -> tuple[list[NodeReport], list[str]]:
    site = "/opt/env/lib/python3.11/site-packages"
    facts = {
        "package": "torch", "absent": False, "declared": "2.13.0", "folder": site, "also": [], "changed": [],
        "record_sha256": "ab", "editable": False, "version": "2.13.0", "path": f"{site}/torch/__init__.py",
        "from": "site",
    }  # fmt: skip
    python = Finding("python.version", "pass", "Python 3.11.7")
    fit, odd = (
        judge_package({**facts, **changes}, PreflightConfig())
        for changes in ({}, {"path": "/home/me/lib/torch/__init__.py", "from": "PYTHONPATH", "version": "2.12.0"})
    )
    reports = [NodeReport(f"node{number}", (python, odd if number == 4 else fit)) for number in range(1, 7)]
    return reports, [f"node{number}" for number in range(1, 8)]


REPORTS: dict[str, Callable[[], tuple[list[NodeReport], list[str]]]] = {
    "one node imports another torch": _five_fit_one_odd_one_silent,
}

CHECKS: dict[str, Callable[[Block], Iterable[str]]] = {
    "yaml": wrong_yaml,
    "json": wrong_json,
    "jsonl": wrong_json,
    "python": wrong_python,
    "text": wrong_text,
    "bash": lambda block: (),
    "console": lambda block: (),
    "indented": lambda block: (),
}
