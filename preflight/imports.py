"""What a node really imports: run as a program, one JSON line per package, flushed before the next import begins.

An import may raise anything, hang, or kill the process. So nothing is caught here: the collector reads how far this
program came, blames the package that ended it, and starts it again behind that package.
"""

from __future__ import annotations

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

REQUIRED = ("torch", "transformers", "peft", "accelerate", "safetensors", "submitit", "omegaconf", "numpy", "PIL")
OPTIONAL = ("fla", "causal_conv1d", "triton", "tilelang")
DISTRIBUTIONS = {
    "PIL": "pillow",
    "fla": "flash-linear-attention",
    "causal_conv1d": "causal-conv1d",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


def distribution_of(package: str) -> importlib.metadata.Distribution | None:
    """The installed distribution that should provide the module `package`, or None."""
    try:
        return importlib.metadata.distribution(DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return None


def declared(distribution: importlib.metadata.Distribution) -> dict[str, Any]:
    """Version, folder, sha256 of the RECORD and editable origin, as the installer wrote them."""
    record = distribution.read_text("RECORD")
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    return {
        "declared": distribution.version,
        "folder": str(Path(str(distribution.locate_file(""))).resolve()),
        "record_sha256": hashlib.sha256(record.encode()).hexdigest() if record else None,
        "editable": bool(origin.get("dir_info", {}).get("editable", False)),
    }


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
    facts: dict[str, Any] = {"package": package, **(declared(distribution) if distribution else {})}
    if distribution is None and importlib.util.find_spec(package) is None:
        return {**facts, "absent": True}
    return {**facts, "absent": False, **imported(package)}


def main() -> None:
    """Describe the packages named on the command line, one JSON line each; a line `{"begin": ...}` goes before."""
    for package in sys.argv[1:]:
        print(json.dumps({"begin": package}), flush=True)
        print(json.dumps(describe(package)), flush=True)


if __name__ == "__main__":
    main()
