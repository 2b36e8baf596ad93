"""Preflight of a job on one GPU, kernel pins made and proved, and what a first update costs on a fresh machine.

    python -m tests.bench.gpu_preflight OUT.json

Needs one GPU with committed pins. The correctness gate comes first: packs against transformers' own model. Every step
is a process of its own; a first update (`--shape PREFIX COUNT LENGTH`) starts with empty caches of compiled kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from configs import compose, kernel_pins, runfolder
from prefix_train import bench_gate, bench_measure, bench_pack, kernels

PERIOD = Path(__file__).parents[1] / "data" / "period-27b.yaml"
"""One period of the 27B geometry: three Gated DeltaNet layers and one of attention."""


@dataclass
class Visit:
    """What has been found so far, written after every step. seconds: of each step's process."""

    out: Path
    shape: tuple[int, int, int]
    found: dict[str, Any] = field(default_factory=dict)

    def step(self, name: str, program: list[str], environment: Mapping[str, str] | None = None) -> Any:
        """Run a program; its exit status, its seconds and the document on its last line."""
        began = time.monotonic()
        ran = subprocess.run(
            [sys.executable, "-m", *program],
            env=os.environ | dict(environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        lines = ran.stdout.splitlines()
        answers = [line for line in lines if line.startswith("{")]
        answer = json.loads(answers[-1]) if answers else None
        self.found[name] = {"status": ran.returncode, "seconds": round(time.monotonic() - began, 1), "answer": answer}
        if ran.returncode or answer is None:
            self.found[name]["output"] = lines[-25:]
        runfolder.write_json(self.out, self.found)
        print(f"{name}: status {ran.returncode}, {self.found[name]['seconds']} s", flush=True)
        return answer

    def all(self, here: Path) -> bool:
        """Every step, with its files in the folder `here`; whether the whole of it passed."""
        run, fresh = here / "run", here / "pins"
        run.mkdir()
        runfolder.write_text(run / runfolder.CONFIG, compose.to_yaml(compose.load(PERIOD)))
        own = ["tests.bench.gpu_preflight", str(self.out), "--shape", *map(str, self.shape), "--part"]
        gate = self.step("gate", [*own, "gate"], caches(here / "of the gate"))
        empty = caches(here / "of updates")
        cold = self.step("first_update", [*own, "updates"], empty)
        self.step("first_update_again", [*own, "updates"], empty)
        self.step("preflight", ["preflight", "run", str(run), "--json"], caches(here / "of preflight"))
        self.step("collectives", ["preflight", "collectives", str(run), "--spawn", "1"])
        self.step("judge", ["preflight", "judge", str(run), "--ranks", "1", "--json"])
        self.step("tune", ["prefix_train.cli", "tune", str(PERIOD), "--out", str(fresh), "--json"])
        if cold:
            first = cold["compile_s"] + cold["updates_s"][0]
            self.found["first_minus_warm_s"] = round(first - min(cold["updates_s"][1:]), 2)
        ended = all(each["status"] == 0 for each in self.found.values() if isinstance(each, dict))
        return bool(ended and gate and gate["passed"])


def caches(folder: Path) -> dict[str, str]:
    """Environment with empty caches of compiled kernels in `folder`."""
    names = {"TRITON_CACHE_DIR": "triton", "TILELANG_CACHE_DIR": "tilelang", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    return {name: str(folder / place) for name, place in names.items()}


def case(shape: tuple[int, int, int]) -> bench_pack.Case:
    return bench_pack.Case(str(PERIOD), *shape)


def gate(shape: tuple[int, int, int]) -> dict[str, Any]:
    """Losses of packs and of transformers' own model over 64 examples, bfloat16, the geometry's head sizes."""
    kernels.use_pins()
    return bench_gate.agreement(case(shape).config(), "bfloat16", torch.device("cuda", 0))


def updates(shape: tuple[int, int, int]) -> dict[str, Any]:
    """Three updates as a rank makes them. compile_s: before the first, for kernels that it would compile itself."""
    began, device = time.monotonic(), torch.device("cuda", 0)
    said = kernels.use_pins()
    imported = time.monotonic() - began
    compiling = kernels.compile_ahead(case(shape).config(), device)
    row = bench_measure.Row("packed", case(shape), device)
    with kernels.watched() as launches:
        seconds = [bench_measure.seconds(row.run, device) for _ in range(3)]
    return {"pins": said, "import_s": round(imported, 2), "compile_s": round(compiling, 2),
            "updates_s": [round(each, 2) for each in seconds], "searches": sum(launches.searches.values()),
            "peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 1)}  # fmt: skip


PARTS: dict[str, Callable[[tuple[int, int, int]], dict[str, Any]]] = {"gate": gate, "updates": updates}


def main() -> int:
    """The whole visit, or one part of it in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", type=int, nargs=3, default=(64000, 80, 1000), metavar=("PREFIX", "COUNT", "LENGTH"))
    parser.add_argument("--part", choices=sorted(PARTS))
    given = parser.parse_args()
    if given.part:
        print(json.dumps(PARTS[given.part](tuple(given.shape))))
        return 0
    device = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "driver": torch.version.cuda}
    visit = Visit(given.out, tuple(given.shape), {"machine": {"status": 0, **device, **kernels.versions()}})
    with tempfile.TemporaryDirectory() as here:
        passed = visit.all(Path(here))
    visit.found["passed"] = passed
    visit.found["pins"] = kernel_pins.digest(kernel_pins.folder(torch.cuda.get_device_name()))
    runfolder.write_json(given.out, visit.found)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
