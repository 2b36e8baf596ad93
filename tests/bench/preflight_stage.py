"""What a fit node's disk holds before a case spoils it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from configs import kernel_pins, runfolder
from tests.bench.preflight_node import H200, MODEL_FILES, Node

ROOT = Path(__file__).resolve().parents[2]


def make_node(folder: Path, name: str, **preflight: Any) -> Node:
    """A fit node, with the run folder of a job that wants one GPU per node, its data, model and pins.

    preflight: options of that section.
    """
    node = Node(folder, name)
    (node.run / "code").mkdir(parents=True)
    node.model.mkdir()
    node.path.mkdir()
    (node.run / "code" / "module.py").write_text("x = 1\n")
    node.train.write_text('{"messages": []}\n')
    options = yaml.safe_load((ROOT / "tests/data/period-27b.yaml").read_text())
    runfolder.write_json(node.model / "config.json", options["model"].pop("build"))
    for file, content in MODEL_FILES.items():
        (node.model / file).write_bytes(content)
    options["model"]["path"] = str(node.model)
    options["data"]["train"] = str(node.train)
    options["preflight"] = {"prove_pins": False, "deadline_s": 60, **preflight}
    (node.run / "config.yaml").write_text(yaml.safe_dump(options))
    make_pins(node.pins)
    return node


def make_pins(pins: Path) -> None:
    """Pins of two kernels for the GPU that is stood in for."""
    made = {"triton": "3.7.1", "fla": "0.6.0", "dtype": "bfloat16", "gpu": H200["name"], "date": "2026-11-30"}
    config = {"kwargs": {"BK": 64}, "num_warps": 4, "num_stages": 3, "num_ctas": 1}
    kinds = {"l2norm_fwd_kernel": "fla", "chunk_fwd_kernel_o": "triton"}
    for kernel in kinds:
        runfolder.write_json(pins / f"{kernel}.json", kernel_pins.document(kernel, config, made, []))
    listed = {kernel: kernel_pins.entry(pins, kernel, kind) for kernel, kind in kinds.items()}
    runfolder.write_json(pins / kernel_pins.LIST, {**made, "kernels": listed})
