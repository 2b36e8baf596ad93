"""What a node really imports: run as a program, one JSON line per package, flushed before the next import begins.

An import may raise anything, hang, or kill the process. So nothing is caught here: the collector reads how far this
program came, blames the package that ended it, and starts it again behind that package.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import site
import sys
from pathlib import Path
from typing import Any

from preflight.programs import answer_and_end

REQUIRED = ("torch", "transformers", "peft", "accelerate", "safetensors", "submitit", "omegaconf", "numpy", "PIL")
OPTIONAL = ("fla", "causal_conv1d", "triton", "tilelang")
DISTRIBUTIONS = {
    "PIL": "pillow",
    "fla": "flash-linear-attention",
    "causal_conv1d": "causal-conv1d",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
PARTS = {"fla": ("fla-core",)}
"""Distributions that install files of the same module besides its own one."""


def distribution_of(package: str) -> importlib.metadata.Distribution | None:
    """The installed distribution that should provide the module `package`, or None."""
    try:
        return importlib.metadata.distribution(DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return None


def declared(package: str, distribution: importlib.metadata.Distribution) -> dict[str, Any]:
    """Version, folder, sha256 of the RECORD, editable origin as the installer wrote them; what else declares it."""
    record = distribution.read_text("RECORD")
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    name = DISTRIBUTIONS.get(package, package)
    found = {(other.version, _folder(other)) for other in importlib.metadata.distributions(name=name)}
    parts = [part for part in PARTS.get(package, ()) if any(importlib.metadata.distributions(name=part))]
    return {
        "declared": distribution.version,
        "folder": _folder(distribution),
        "also": sorted(version for version, folder in found if folder != _folder(distribution)),
        "record_sha256": hashlib.sha256(record.encode()).hexdigest() if record else None,
        "editable": bool(origin.get("dir_info", {}).get("editable", False)),
        "changed": changed(distribution)
        + [file for part in parts for file in changed(importlib.metadata.distribution(part))],
    }


def changed(distribution: importlib.metadata.Distribution) -> list[str]:
    """Files that are not what the installer recorded: edited by hand, cut short, or gone.

    Python files are read; of shared libraries, which are large, only the size is looked at.
    """
    root, different = str(distribution.locate_file("")), []
    for row in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        name, digest, size = [*row, "", ""][:3]
        kind, _, value = digest.partition("=")
        if kind != "sha256" or name.startswith("../"):
            continue  # scripts lie elsewhere, and installers move them
        path, (_, *suffixes) = os.path.join(root, name), name.rpartition("/")[2].split(".")
        if suffixes[-1:] == ["py"] and (not os.path.isfile(path) or _recorded_form(path) != value):
            different.append(name)
        if "so" in suffixes and size and (not os.path.isfile(path) or os.stat(path).st_size != int(size)):
            different.append(name)
    return different


def sources(folder: Path, pattern: str = "*.py") -> str:
    """sha256 over names and contents of the files in a folder whose names fit, but for what Python compiled there."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob(pattern)):
        if "__pycache__" in path.parts or not path.is_file():
            continue
        total.update(f"{path.relative_to(folder)}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def where_from(path: Path) -> str:
    """`PYTHONPATH`, `user-site` or `site`: which part of the path a module file came from."""
    for entry in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if path.is_relative_to(Path(entry).resolve()):
            return "PYTHONPATH"
    user = site.getusersitepackages()
    return "user-site" if path.is_relative_to(Path(user).resolve()) else "site"


def imported(package: str) -> dict[str, Any]:
    """Import `package` and describe what came: version, file, and the part of the path it came from."""
    module = importlib.import_module(package)
    file = module.__file__ or next(iter(module.__path__), "")
    path = Path(file).resolve()
    return {"version": getattr(module, "__version__", None), "path": str(path), "from": where_from(path)}


def describe(package: str) -> dict[str, Any]:
    """Declared and imported facts of one package; `absent` where neither exists."""
    distribution = distribution_of(package)
    facts: dict[str, Any] = {"package": package, **(declared(package, distribution) if distribution else {})}
    if distribution is None and importlib.util.find_spec(package) is None:
        return {**facts, "absent": True}
    facts |= {"absent": False, **imported(package)}
    if facts.get("editable"):
        facts["source_sha256"] = sources(Path(facts["path"]).parent)
    return facts


def main() -> None:
    """Describe the packages named on the command line, one JSON line each."""
    for package in sys.argv[1:]:
        print(json.dumps(describe(package)), flush=True)


def _folder(distribution: importlib.metadata.Distribution) -> str:
    return str(Path(str(distribution.locate_file(""))).resolve())


def _recorded_form(path: str) -> str:
    with open(path, "rb") as file:
        return base64.urlsafe_b64encode(hashlib.sha256(file.read()).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    from preflight import imports  # the module by its name, as others that are imported here see it

    answer_and_end(imports.main)
