"""Recorded choices of a GPU's kernel searches, as files: `configs/fla/<GPU>/<kernel>.json` and their list, `pins.json`.

Two kinds. `fla`: kernels under flash-linear-attention's own decorator, which reads `default_config` itself
(fla/ops/utils/cache.py of 0.6.0; FLA_CACHE_MODE=default, FLA_CONFIG_DIR). `triton`: kernels under plain
`triton.autotune`, whose recorded winner prefix_train/kernels.py sets as the only configuration. Neither FLA nor Triton
compares versions or complains of a missing file; `problems` does.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODE = {"FLA_CACHE_MODE": "default"}
"""What must stand in a rank's environment before `fla` is imported, besides FLA_CONFIG_DIR."""
LIST = "pins.json"
KINDS = ("fla", "triton")
ROOT = Path(__file__).resolve().parent / "fla"
_CONFIG = {"kwargs": dict, "num_warps": int, "num_stages": int, "num_ctas": int}
"""Fields of a configuration: without `num_ctas` FLA raises from Triton 3.5.1 on."""


def folder(gpu: str, root: Path = ROOT) -> Path:
    """Where the pins of the GPU model `gpu` (`NVIDIA H200`) lie; its name is written as FLA writes it."""
    return root / (re.sub(r"[^0-9A-Za-z]+", "_", gpu).strip("_") or "unknown_gpu")


def environment(pins: Path) -> dict[str, str]:
    """What FLA reads at import to use `pins`."""
    return {**MODE, "FLA_CONFIG_DIR": str(pins)}


def read_list(pins: Path) -> dict[str, Any]:
    """The list of a folder of pins. FileNotFoundError without one, ValueError where it is malformed."""
    document: Any = json.loads((pins / LIST).read_text(encoding="utf-8"))
    named = document.get("kernels") if isinstance(document, dict) else None
    if not isinstance(named, dict) or not all(isinstance(entry, dict) for entry in named.values()):
        raise ValueError(f"{pins / LIST}: no table `kernels`")
    assert isinstance(document, dict)
    return document


def read_config(pins: Path, kernel: str) -> dict[str, Any]:
    """The pinned configuration of `kernel`: kwargs, num_warps, num_stages, num_ctas."""
    config: dict[str, Any] = json.loads((pins / f"{kernel}.json").read_text(encoding="utf-8"))["default_config"]
    return config


def digest(pins: Path) -> str:
    """sha256 over names and contents of all JSON files of a folder."""
    total = hashlib.sha256()
    for path in sorted(pins.glob("*.json")):
        total.update(f"{path.name}\0{_sha256(path)}\0".encode())
    return total.hexdigest()


def problems(pins: Path, gpu: str, versions: Mapping[str, str | None]) -> dict[str, str]:
    """Kernel (or `pins.json`) -> why it is not pinned; empty where every listed kernel is.

    gpu: model of the node's GPU. versions: imported versions of `triton` and `fla`, and the model's `dtype`.
    """
    if not pins.is_dir():
        return {LIST: f"{pins} does not exist"}
    try:
        named = read_list(pins)
    except FileNotFoundError:
        return {LIST: f"missing in {pins}"}
    except ValueError as error:
        return {LIST: f"malformed: {error}"}
    found = {kernel: why for kernel, entry in named["kernels"].items() if (why := _why_not(pins, kernel, entry))}
    unlisted = {path.stem for path in pins.glob("*.json")} - named["kernels"].keys() - {Path(LIST).stem}
    found |= dict.fromkeys(sorted(unlisted), "has a file, but the list does not name it")
    made_for = {"gpu": gpu, **versions}
    other = [f"made for {what} {named.get(what)}, here is {here}" for what, here in made_for.items()
             if named.get(what) != here]  # fmt: skip
    return {LIST: "; ".join(other), **found} if other else found


def document(kernel: str, config: Mapping[str, Any], made: Mapping[str, Any], searches: list[Any]) -> dict[str, Any]:
    """One kernel's file. made: triton, fla, gpu, date. searches: what each search found, for people to read."""
    return {"kernel_name": kernel, "triton_version": made["triton"], "fla_version": made["fla"], "gpu": made["gpu"],
            "date": made["date"], "default_config": dict(config), "searches": searches}  # fmt: skip


def entry(pins: Path, kernel: str, kind: str) -> dict[str, str]:
    """A kernel's line in the list."""
    return {"kind": kind, "sha256": _sha256(pins / f"{kernel}.json")}


def _why_not(pins: Path, kernel: str, listed: Mapping[str, Any]) -> str | None:
    path = pins / f"{kernel}.json"
    if not path.is_file():
        return "file missing"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return f"malformed: {error}"
    config = document.get("default_config") if isinstance(document, dict) else None
    if not isinstance(config, dict):
        return "malformed: no default_config"
    for name, kind in _CONFIG.items():
        if not isinstance(config.get(name), kind):
            return f"malformed: default_config has no {name}"
    if listed.get("kind") not in KINDS:
        return f"malformed: kind {listed.get('kind')!r} in the list"
    if document.get("kernel_name") != kernel:
        return f"made for kernel {document.get('kernel_name')}"
    if _sha256(path) != listed.get("sha256"):
        return "edited since it was made"
    return None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
