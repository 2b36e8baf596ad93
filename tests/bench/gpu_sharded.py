"""One pack per GPU under FSDP2 over NCCL, beside one GPU alone: positions/s of each GPU, and the same gradients.

    python -m tests.bench.gpu_sharded OUT.json [--worlds 1 2 4 8] [--seconds LIMIT] [--layers N; 0: all]
        [--pack PREFIX COUNT LENGTH] [--override KEY=VALUE ...] [--with N KEY=VALUE ...]

First as many small packs as the most ranks are, in float32, on each number of ranks: no figure unless the gradients are
those of one rank. Then the most ranks train, save and go on, and each smaller number goes on from that save: none
unless the weights move alike. Then whole updates of each number, one pack on each rank. OUT is written after each, a
table to OUT.md at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from configs import runfolder
from prefix_train import kernels
from prefix_train.bench_pack import Case
from prefix_train.dist import joined
from tests.bench import sharded_parts
from tests.lives import free_port
from tests.standins import ROOT

BOUND = 1e-5
"""Of each gradient's difference, relative to its norm, in float32."""

MOVED_BOUND = 1e-3
"""Of what each weight has moved: Adam divides by the root of tiny second moments, which roundings make differ."""

PARTS = ("gate", "resume", "speed")


def rank(part: str, case: Case, shape: tuple[int, int, int], packs: int, out: Path) -> None:
    """One rank, as the environment says; rank 0 writes `out`."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        kernels.use_pins(dtype="bfloat16")
    with joined(120.0) as ranks:
        if part == "speed" and ranks.device.type == "cuda":
            kernels.compile_ahead(case.config(), ranks.device)
        if part == "speed":
            found = sharded_parts.speed(case, ranks)
        elif part == "gate":
            found = sharded_parts.gate(case, shape, packs, ranks, out)
        else:
            found = sharded_parts.resume(case, shape, packs, ranks, out)
        every = ranks.gather(found)
        if ranks.rank == 0:
            runfolder.write_json(out, {"ranks": every})


def launch(
    part: str, world: int, case: Case, shape: tuple[int, int, int], packs: int, out: Path, seconds: float
) -> dict[str, Any]:
    """Run so many ranks to their end; what rank 0 wrote, or how they ended."""
    given = json.dumps({**dataclasses.asdict(case), "shape": shape, "packs": packs})
    program = [sys.executable, "-m", "tests.bench.gpu_sharded", str(out), "--rank", part, "--given", given]
    port, running = str(free_port()), []
    for number in range(world):
        own = {**os.environ, "RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_RANK": str(number),
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        running.append(subprocess.Popen(program, env=own, cwd=ROOT))
    until, statuses = time.monotonic() + seconds, []
    for process in running:
        try:
            statuses.append(process.wait(max(0.1, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            statuses.append(None)
            for other in running:
                other.kill()
    return dict(runfolder.read_json(out)) if statuses == [0] * world else {"ended": statuses}


def compare(one: Path, two: Path, bound: float = BOUND) -> dict[str, Any]:
    """The worst tensor's relative difference."""
    alone, both = load_file(one), load_file(two)
    total = torch.stack([each.double().norm() for each in alone.values()]).norm()
    worst = max(
        float((both[name] - each).double().norm() / max(each.double().norm(), 1e-6 * total))
        for name, each in alone.items()
    )
    return {
        "passed": alone.keys() == both.keys() and total > 0 and worst <= bound,
        "tensors": len(alone),
        "worst": worst,
    }


class Bench:
    """Runs the parts one after the other on each number of ranks; `out` has what is known."""

    def __init__(
        self,
        case: Case,
        shape: tuple[int, int, int],
        out: Path,
        seconds: float,
        worlds: Sequence[int] = (1, 2),
        also: Mapping[int, tuple[str, ...]] | None = None,
    ) -> None:
        self.case, self.shape, self.out, self.until = case, shape, out, time.monotonic() + seconds
        self.worlds, self.also, self.found = sorted(worlds), also or {}, dict[str, Any]()

    def measure(self) -> dict[str, Any]:
        """Everything; what there is where a part fails or the time is up."""
        self._write()
        shutil.rmtree(sharded_parts.run_beside(self.out), ignore_errors=True)
        steps = [("gate", self.worlds), ("resume", self.worlds[::-1]), ("speed", self.worlds[::-1])]
        for part, worlds in steps:
            for world in worlds:
                if not self._run(part, world):
                    return self.found
            if part != "speed" and not self._same(part, worlds[0]):
                return self.found
        self.found["per_gpu_over_1"] = self._per_gpu()
        self._write()
        runfolder.write_text(self.out.with_suffix(".md"), table(self.found, self.worlds))
        return self.found

    def _run(self, part: str, world: int) -> bool:
        """Whether it ended well."""
        name, left = f"{part} on {world}", self.until - time.monotonic()
        if left < 1:
            return False
        more = self.also.get(world, ()) if part == "speed" else ()
        case = dataclasses.replace(self.case, overrides=(*self.case.overrides, *more))
        out = self._path(part, world, ".json")
        self.found[name] = launch(part, world, case, self.shape, self.worlds[-1], out, left)
        print(f"{name}: {self.found[name]}", flush=True)
        self._write()
        return "ended" not in self.found[name]

    def _same(self, part: str, reference: int) -> bool:
        """Whether all numbers of ranks left the tensors of `reference`."""
        bound = BOUND if part == "gate" else MOVED_BOUND
        paths = {world: self._path(part, world, ".safetensors") for world in self.worlds}
        others = {world: path for world, path in paths.items() if world != reference}
        self.found[part] = {str(world): compare(paths[reference], path, bound) for world, path in others.items()}
        self._write()
        return all(one["passed"] for one in self.found[part].values())

    def _per_gpu(self) -> dict[str, float]:
        speeds = {world: self.found[f"speed on {world}"]["ranks"] for world in self.worlds}
        slowest = {world: min(one["positions_per_s_per_gpu"] for one in ranks) for world, ranks in speeds.items()}
        return {str(world): slowest[world] / slowest[self.worlds[0]] for world in self.worlds[1:]}

    def _path(self, part: str, world: int, suffix: str) -> Path:
        return self.out.with_suffix(f".{part}{world}{suffix}")

    def _write(self) -> None:
        runfolder.write_json(self.out, self.found)


def table(found: Mapping[str, Any], worlds: Sequence[int]) -> str:
    """The record as Markdown; of several ranks the slowest, and the highest peak."""
    lines = ["| GPUs | update | positions/s | utilisation | peak | per GPU against one |", "| --- |" + " --- |" * 5]
    for world in worlds:
        ranks = found[f"speed on {world}"]["ranks"]
        slowest = min(ranks, key=lambda one: one["positions_per_s_per_gpu"])
        peak = max((one["peak_gib"] for one in ranks if "peak_gib" in one), default=None)
        cells = [
            f"{slowest['positions'] / slowest['positions_per_s_per_gpu']:.2f} s",
            f"{world * slowest['positions_per_s_per_gpu']:,.0f}",
            f"{slowest['model_utilisation']:.1%}",
            "not told" if peak is None else f"{peak:.1f} GiB",
            f"{found['per_gpu_over_1'].get(str(world), 1.0):.1%}",
        ]
        lines.append(f"| {world} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--geometry", default="qwen3.6-27b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--pack", type=int, nargs=3, default=[64_000, 80, 1000])
    parser.add_argument("--gate", type=int, nargs=3, default=[130, 5, 47])
    parser.add_argument("--override", nargs="*", default=["memory.offload=auto", "memory.keep_attention=auto"])
    parser.add_argument("--with", nargs="+", action="append", default=[], dest="also", metavar=("N", "KEY=VALUE"))
    parser.add_argument("--rank", choices=PARTS)
    parser.add_argument("--given")
    given = parser.parse_args()
    if given.rank:
        told = json.loads(given.given)
        shape, packs = tuple(told.pop("shape")), told.pop("packs")
        rank(given.rank, Case(**{**told, "overrides": tuple(told["overrides"])}), shape, packs, given.out)
        return 0
    case = Case(given.geometry, *given.pack, layers=given.layers or None, warm=1, overrides=tuple(given.override))
    also = {int(world): tuple(more) for world, *more in given.also}
    found = Bench(case, tuple(given.gate), given.out, given.seconds, given.worlds, also).measure()
    return 0 if "per_gpu_over_1" in found else 1


if __name__ == "__main__":
    sys.exit(main())
