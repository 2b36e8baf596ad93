"""The JSON file that the pack bench's rows are added to, and what they say side by side."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import configs
import prefix_train
from configs import runfolder
from configs.errors import UserError
from configs.schema import Config
from configs.wording import counted
from prefix_train import kernel_choice

GATE = "gate"

COMPARED = ("geometry", "prefix", "continuations", "length", "layers", "overrides")
"""What two rows' cases must have in common for one to be set against the other."""


def read(out: Path) -> dict[str, Any]:
    """What `out` has so far. Raises UserError where it is not a file of this bench."""
    if not out.exists():
        return {"rows": [], GATE: {}}
    try:
        found = runfolder.read_json(out)
    except (OSError, ValueError) as error:
        raise UserError(f"--out {out}: it cannot be read as JSON ({error}): give another file") from error
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list) or not isinstance(found.get(GATE), dict):
        raise UserError(f"--out {out}: it holds something else than this bench's rows: give another file")
    return found


def write(out: Path, found: dict[str, Any]) -> None:
    """Write `out`, also before anything is measured: a row must not be lost for want of a place."""
    try:
        runfolder.write_json(out, found)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}") from error


def gated(geometry: str, config: Config) -> dict[str, Any]:
    """What a gate that has passed holds for: these sources, this torch, this model and adapter and its kernels.

    UserError as `kernel_choice.choose`, of this machine.
    """
    sources = hashlib.sha256()
    for package in (configs, prefix_train):
        folder = Path(next(iter(package.__path__)))
        for path in sorted(folder.rglob("*.py")):
            sources.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    settled = kernel_choice.settle(config, kernel_choice.here())
    model = {name: value for name, value in asdict(settled.model).items() if name != "build"}
    memory = {name: value for name, value in asdict(config.memory).items() if name != "offload"}
    parts = {"model": model, "adapter": asdict(config.adapter), "memory": memory}
    return {"geometry": geometry, "sources": sources.hexdigest(), "torch": version("torch"), **parts}


def add(found: dict[str, Any], measured: dict[str, Any]) -> None:
    """Put a row, or what there is of it so far, in the place of the same one, and draw the ratios anew."""
    same = (measured["row"], measured.get("case"))
    found["rows"] = [*(old for old in found["rows"] if (old["row"], old.get("case")) != same), measured]
    found["ratios"] = ratios(found["rows"])


def _whole(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if not row.get("partial")]


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the pack saves, for each case of which the pack and something beside it were measured."""
    found = []
    for packed in (row for row in _whole(rows) if row["row"] == "packed"):
        beside = {row["row"]: row for row in _whole(rows) if _compared(row) == _compared(packed)}
        ratio: dict[str, Any] = {"case": packed["case"]}
        if alone := beside.get("standalone"):
            ratio["standalone"] = alone["all_s"] / packed["median_s"]
            ratio["flops_per_s"] = alone["model_tflops"] / packed["model_tflops"]
        if flex := beside.get("flex"):
            ratio["flex"] = flex["median_s"] / packed["median_s"]
        found.append(ratio)
    return found


def _compared(row: dict[str, Any]) -> list[Any]:
    return [row["case"].get(name) for name in COMPARED]


def text(found: dict[str, Any]) -> str:
    """The figures for a person."""
    lines = ["the gate has passed"] if found[GATE].get("passed") else []
    for row in _whole(found["rows"]):
        case, memory = row["case"], row["memory"]
        layers = counted(case["layers"], "layer") if case["layers"] else "all layers"
        lines.append(
            f"{row['row']:<11} {layers}, {case['prefix']:,} + {case['continuations']} x "
            f"{case['length']:,}: first {row['first_s']:.1f} s, then {row['median_s']:.2f} s "
            f"({row['min_s']:.2f} to {row['max_s']:.2f}); {row['positions_per_s']:,.0f} positions/s, "
            f"{row['logical_per_s']:,.0f} logical tokens/s; {row['model_tflops']:.0f} TFLOP/s of the model, "
            f"{row['model_utilisation']:.1%}, with recomputation {row['hardware_utilisation']:.1%}; "
            f"peak {memory['above_weights_gib']:.1f} GiB above {memory['weights_gib']:.1f} GiB of weights"
        )
        if memory.get("copying_hidden") is not None:
            lines[-1] += f"; {memory['copying_hidden']:.1%} of the copying behind computing"
        if memory.get("predicted_peak_gib") and memory["peak_allocated_gib"]:
            off = memory["peak_allocated_gib"] / memory["predicted_peak_gib"] - 1
            lines[-1] += f"; peak in all {off:+.1%} of what was predicted"
    for ratio in found.get("ratios", []):
        shown = {"standalone": "the examples alone", "flex": "FlexAttention"}
        lines += [f"{ratio[name]:.2f} times the pack: {what}" for name, what in shown.items() if name in ratio]
    return "\n".join(lines)
