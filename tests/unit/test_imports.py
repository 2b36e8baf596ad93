"""Who may import whom, read with `ast`; and what must start without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "prefix_train", "preflight", "slurm")

MAY_IMPORT = {
    "configs": {"configs"},
    "prefix_train": {"configs", "prefix_train"},
    "preflight": {"configs", "preflight"},
    "slurm": {"configs", "prefix_train", "preflight", "slurm"},
}

WITHOUT_TORCH = [
    "configs.schema",
    "configs.compose",
    "configs.modelpath",
    "prefix_train",
    "prefix_train.budget",
    "prefix_train.budget_choices",
    "prefix_train.budget_room",
    "prefix_train.layer_bytes",
    "prefix_train.shape",
    "prefix_train.cli",
    "prefix_train.gguf_config",
    "prefix_train.heartbeat",
    "prefix_train.lengths",
    "prefix_train.metrics",
    "prefix_train.near_misses",
    "prefix_train.plan",
    "prefix_train.plan_page.trees",
    "prefix_train.prompts",
    "prefix_train.results.page",
    "prefix_train.ring",
    "prefix_train.rows",
    "prefix_train.sharing",
    "prefix_train.tables",
    "prefix_train.stream.origin",
    "prefix_train.tree",
    "preflight.judge",
    "preflight.report",
    "slurm.submit",
    "slurm.watch",
    "slurm.finish",
    "slurm.diagnose",
    "slurm.status",
    "slurm.life",
    "slurm.presence",
    "slurm.local",
    "preflight.__main__",
]

NAMED_ELSEWHERE = {"inspect", "io", "json", "queue", "random", "select", "signal", "string", "time", "types", "typing"}
"""Standard modules that a file in slurm/ would hide from `python slurm/submit.py`, the likeliest ones."""


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Dotted names of our own modules that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.ImportFrom):
            pytest.fail(f"{path}:{node.lineno}: relative import; write the full name")
    return {name for name in names if name.split(".")[0] in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_the_table_allows(package: str) -> None:
    for path in modules(package):
        used = {name.split(".")[0] for name in imported(path)}
        assert used <= MAY_IMPORT[package], f"{path} imports {used - MAY_IMPORT[package]}"


def test_the_table_is_true_not_only_wide_enough() -> None:
    for package, allowed in MAY_IMPORT.items():
        used = {name.split(".")[0] for path in modules(package) for name in imported(path)}
        assert allowed - {package} - used <= {"preflight"}, f"{package} no longer needs {allowed - used}"


def test_only_patch_names_layers_of_transformers() -> None:
    for path in modules("prefix_train"):
        if path.stem in {"patch", "families"}:
            continue
        text = path.read_text(encoding="utf-8")
        reached = re.search(r"transformers\.models\.(?!auto\.)", text)
        assert reached is None, f"{path} reaches into the classes of a model family"


def test_no_import_cycles_at_module_level() -> None:
    graph: dict[str, set[str]] = {}
    files = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for package in PACKAGES for p in modules(package)}
    for name, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        graph[name] = {
            other
            for node in top.body
            for other in ([a.name for a in node.names] if isinstance(node, ast.Import) else [str(node.module)])
            if other in files
        }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join([*path, name])}"
        if name not in done:
            for other in graph[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_starts_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def test_no_file_in_slurm_hides_a_standard_module() -> None:
    names = {path.stem for path in modules("slurm")} - {"__init__"}
    assert not names & (NAMED_ELSEWHERE | set(sys.stdlib_module_names))
