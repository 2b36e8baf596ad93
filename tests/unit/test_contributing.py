"""What CONTRIBUTING.md relies on: hooks that run, an import table and habits that are those of the tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from identify.identify import tags_from_path
from pre_commit.clientlib import InvalidConfigError, load_config

from tests import documents
from tests.documents import ROOT

CONFIG = ROOT / ".pre-commit-config.yaml"


SPOILT = {
    "ruff-check": ("bad.py", "import os\n"),
    "ruff-format": ("bad.py", "A=1\n"),
    "check-added-large-files": ("bad.bin", "x" * 700_000),
    "check-merge-conflict": ("bad.txt", "<<<<<<< HEAD\na\n=======\nb\n>>>>>>> other\n"),
    "check-yaml": ("bad.yaml", "a: [\n"),
    "check-toml": ("bad.toml", "a = \n"),
    "end-of-file": ("bad.txt", "a"),
    "trailing-whitespace": ("bad.txt", "a \n"),
}
"""By hook, a file that it does not let pass."""


def hooks() -> dict[str, str]:
    """Entries by id."""
    (local,) = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["repos"]
    return {hook["id"]: hook["entry"] for hook in local["hooks"]}


def test_the_hooks_are_a_configuration_of_pre_commit(tmp_path: Path) -> None:
    assert load_config(str(CONFIG))["repos"][0]["repo"] == "local"
    assert {*hooks()} == {*SPOILT, "mypy"}
    (tmp_path / "broken.yaml").write_text(CONFIG.read_text(encoding="utf-8").replace("repos:", "repo:"))
    with pytest.raises(InvalidConfigError):
        load_config(str(tmp_path / "broken.yaml"))


def test_every_hook_is_a_program_of_the_environment() -> None:
    for entry in hooks().values():
        program, *_ = entry.split()
        assert program.startswith(".venv/bin/")
        assert os.access(Path(sys.prefix, "bin", Path(program).name), os.X_OK), entry


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one with the hooks, in which a file is fit."""
    folder = tmp_path_factory.mktemp("repository")
    for name in (CONFIG.name, "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "good.py").write_text("A = 1\n")
    run(folder, "git", "init", "-q")
    run(folder, "git", "add", CONFIG.name, "good.py")
    return folder


def run(folder: Path, *program: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"PRE_COMMIT_HOME": str(folder / ".cache"), "HOME": str(folder)}
    return subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_what_is_fit_passes_every_hook(repository: Path) -> None:
    ran = run(
        repository, sys.executable, "-m", "pre_commit", "run", "--files", "good.py", "pyproject.toml", CONFIG.name
    )
    told = {line.split("....")[0] for line in ran.stdout.splitlines() if line.endswith("Passed")}
    assert {"ruff check", "ruff format", "YAML can be read", "files end with one line end"} <= told, ran.stdout
    assert [line for line in ran.stdout.splitlines() if line.endswith("Failed") and "mypy" not in line] == []


@pytest.mark.parametrize(
    ("hook", "spoilt"), [("trailing-whitespace", rb"[ \t]\r?\n"), ("end-of-file", rb"[^\n]\Z|\n\n\Z")]
)
def test_every_committed_file_passes_the_hooks_that_would_change_it(hook: str, spoilt: bytes) -> None:
    """`pre-commit run --all-files` leaves a fresh clone as it is."""
    (local,) = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["repos"]
    (exclude,) = [one["exclude"] for one in local["hooks"] if one["id"] == hook]
    listed = run(ROOT, "git", "ls-files", "-z").stdout.split("\0")
    names = [name for name in listed if name and (ROOT / name).is_file() and not re.search(exclude, name)]
    assert len(names) > 300
    texts = (name for name in names if "text" in tags_from_path(str(ROOT / name)))
    assert [name for name in texts if re.search(spoilt, (ROOT / name).read_bytes())] == []
    name, content = SPOILT[hook]
    assert re.search(spoilt, content.encode()), name


@pytest.mark.parametrize("hook", sorted(SPOILT))
def test_each_hook_stops_a_bad_file(hook: str, repository: Path) -> None:
    name, content = SPOILT[hook]
    (repository / name).write_text(content)
    run(repository, "git", "add", "--force", name)
    ran = run(repository, sys.executable, "-m", "pre_commit", "run", hook, "--files", name)
    run(repository, "git", "rm", "-q", "--cached", "--force", name)
    (repository / name).unlink()
    assert ran.returncode == 1, ran.stdout
    assert "Failed" in ran.stdout


def test_the_lint_of_make_and_of_the_hooks_are_the_same_tools() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in ("ruff check .", "ruff format --check .", "mypy"):
        assert f"\t$(BIN)/{line}\n" in makefile


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/guides/design.md"])
def test_the_import_table_is_the_tests_own(page: str) -> None:
    namespace: dict[str, dict[str, set[str]]] = {}
    source = (ROOT / "tests/unit/test_imports.py").read_text(encoding="utf-8")
    start = source.index("MAY_IMPORT = {")
    exec(source[start : source.index("\n}\n", start) + 2], namespace)  # type: ignore[arg-type]  # noqa: S102
    text = (ROOT / page).read_text(encoding="utf-8")
    for package, allowed in namespace["MAY_IMPORT"].items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{package}/` | "))
        told = row.rsplit("|", 2)[1].strip()
        assert told == ", ".join(f"`{name}`" for name in sorted(allowed)) or (told == "all four" and len(allowed) == 4)


def test_markers_that_pages_may_name_are_those_of_the_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    markers = project["tool"]["pytest"]["ini_options"]["markers"]
    assert {line.partition(":")[0] for line in markers} == {*documents.MARKERS}
