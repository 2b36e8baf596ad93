"""One pack per GPU under FSDP2 over NCCL, beside one GPU alone: positions/s of each GPU, and the same gradients.

    python -m tests.bench.gpu_sharded OUT.json [--seconds LIMIT] [--layers N] [--pack PREFIX COUNT LENGTH] [--tiny]

First two small packs in float32 on one rank, then one of them on each of two ranks: no figure unless the gradients are
the same. Then whole updates of one and of two ranks, a warm one each. OUT is written after each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from configs import runfolder
from configs.schema import Config
from prefix_train import anatomy, bench_gate, bench_measure, gradients, kernels, offload, shard, step
from prefix_train import model as models
from prefix_train.bench import random_examples, star
from prefix_train.bench_pack import Case
from prefix_train.collate import Batch, collate, entry_weights
from prefix_train.dist import Ranks, joined
from tests.lives import free_port
from tests.standins import ROOT

BOUND = 1e-5
"""Of each gradient's difference, relative to its norm, in float32."""

WORLD = 2


def gate_config(case: Case, device: torch.device) -> Config:
    """The geometry at the gate's sizes, in float32, nothing dropped."""
    config = case.config()
    model = dataclasses.replace(config.model, build={**config.model.build, **bench_gate.SMALL})
    model = bench_gate.in_float32(model, device)
    return dataclasses.replace(config, model=model, adapter=dataclasses.replace(config.adapter, dropout=0.0))


def batches_of(config: Config, shape: tuple[int, int, int], mine: range) -> list[Batch]:
    """Of an update of one pack per rank of WORLD: those of `mine`."""
    prefix, count, length = shape
    vocabulary = int(config.model.build["vocab_size"])
    packs = [random_examples(prefix, count, length, vocabulary, number) for number in range(WORLD)]
    weights = entry_weights("example", [int(one.target.sum()) for pack in packs for one in pack])
    return [collate(star(packs[number], prefix), packs[number], weights) for number in mine]


def stepper(config: Config, ranks: Ranks) -> step.Stepper:
    """The model of `config` on these ranks; adapters are not zero."""
    dtype = models.DTYPES[config.model.dtype]
    model = models.adapt(bench_gate.build_on(ranks.device, dict(config.model.build), dtype), config)
    bench_gate.draw_adapters(model)
    models.make_ready(model, config)
    root = models.Root(model.train(), dtype, config.train.loss_chunk_rows, images=False)
    if ranks.mesh is None:
        root.to(ranks.device)
    else:
        shard.shard(root, ranks.mesh)
    offload.attach(root, config, ranks.device)
    parameters = anatomy.trainable(model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-5)
    coverage = gradients.Coverage(list(parameters), frozenset(), config.train.warmup_updates)
    return step.Stepper(root, parameters, optimizer, ranks, coverage, config.seed, config.train.clip_norm)


def mine(ranks: Ranks, alone: int) -> range:
    """Packs of this rank; `alone`: of a rank that is by itself."""
    return range(alone) if ranks.world == 1 else range(ranks.rank, ranks.rank + 1)


def whole_gradients(run: step.Stepper) -> dict[str, torch.Tensor]:
    """Full ones, on the host."""
    found = {}
    for name, parameter in run.parameters.items():
        grad: Any = parameter.grad
        found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).cpu()
    return found


def rank_gate(case: Case, shape: tuple[int, int, int], ranks: Ranks, out: Path) -> dict[str, Any]:
    """Gradients of two small packs into `out`.safetensors."""
    config = gate_config(case, ranks.device)
    run = stepper(dataclasses.replace(config, train=dataclasses.replace(config.train, clip_norm=0.0)), ranks)
    result = step.update(run, 0, 0.0, batches_of(config, shape, mine(ranks, WORLD)))
    found = whole_gradients(run)
    if ranks.rank == 0:
        save_file(found, out.with_suffix(".safetensors"))
    return {"loss": result.loss, "norm": result.norm, "positions": result.positions}


def rank_speed(case: Case, ranks: Ranks, out: Path) -> dict[str, Any]:
    """Seconds of whole updates with one pack on each rank."""
    config, device = case.config(), ranks.device
    shape = (case.prefix, case.continuations, case.length)
    batches = batches_of(config, shape, mine(ranks, 1))
    began = time.monotonic()
    run = stepper(config, ranks)
    built = time.monotonic() - began
    ranks.barrier()
    weights = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def once() -> None:
        step.update(run, 1, 1e-5, batches)

    first = bench_measure.seconds(once, device)
    ranks.barrier()
    warm = [bench_measure.seconds(once, device) for _ in range(case.warm)]
    median = statistics.median(warm)
    found = {
        "built_s": built, "first_s": first, "warm_s": warm, "positions": batches[0].positions,
        "positions_per_s_per_gpu": batches[0].positions / median, "weights_gib": weights / 2**30,
    }  # fmt: skip
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return found


def rank(what: str, case: Case, shape: tuple[int, int, int], out: Path) -> None:
    """One rank, as the environment says; rank 0 writes `out`."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        kernels.use_pins(dtype="bfloat16")
    with joined(120.0) as ranks:
        if what == "speed" and ranks.device.type == "cuda":
            kernels.compile_ahead(case.config(), ranks.device)
        found = rank_gate(case, shape, ranks, out) if what == "gate" else rank_speed(case, ranks, out)
        every = ranks.gather(found)
        if ranks.rank == 0:
            runfolder.write_json(out, {"ranks": every})


def launch(what: str, world: int, case: Case, shape: tuple[int, int, int], out: Path, seconds: float) -> dict[str, Any]:
    """Run so many ranks to their end; what rank 0 wrote, or how they ended."""
    given = json.dumps({**dataclasses.asdict(case), "shape": shape})
    program = [sys.executable, "-m", "tests.bench.gpu_sharded", str(out), "--rank", what, "--given", given]
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


def compare(one: Path, two: Path) -> dict[str, Any]:
    """The worst gradient's relative difference."""
    alone, both = load_file(one), load_file(two)
    total = torch.stack([each.double().norm() for each in alone.values()]).norm()
    worst = max(
        float((both[name] - each).double().norm() / max(each.double().norm(), 1e-6 * total))
        for name, each in alone.items()
    )
    return {
        "passed": alone.keys() == both.keys() and total > 0 and worst <= BOUND,
        "tensors": len(alone),
        "worst": worst,
    }


def measure(case: Case, shape: tuple[int, int, int], out: Path, seconds: float) -> dict[str, Any]:
    """Everything, one after the other; `out` has what is known."""
    until, found = time.monotonic() + seconds, dict[str, Any]()
    runfolder.write_json(out, found)
    for what in ("gate", "speed"):
        for world in (1, WORLD):
            name, left = f"{what} on {world}", until - time.monotonic()
            if left < 1:
                return found
            found[name] = launch(what, world, case, shape, out.with_suffix(f".{what}{world}.json"), left)
            print(f"{name}: {found[name]}", flush=True)
            runfolder.write_json(out, found)
            if "ended" in found[name]:
                return found
        if what == "gate":
            paths = [out.with_suffix(f".gate{world}.safetensors") for world in (1, WORLD)]
            found["gate"] = compare(*paths)
            runfolder.write_json(out, found)
            if not found["gate"]["passed"]:
                return found
    speeds = [found[f"speed on {world}"]["ranks"][0]["positions_per_s_per_gpu"] for world in (1, WORLD)]
    found["per_gpu_at_2_over_1"] = speeds[1] / speeds[0]
    runfolder.write_json(out, found)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--geometry", default="qwen3.6-27b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--pack", type=int, nargs=3, default=[64_000, 80, 1000])
    parser.add_argument("--gate", type=int, nargs=3, default=[130, 5, 47])
    parser.add_argument("--override", nargs="*", default=["memory.offload=auto", "memory.keep_attention=auto"])
    parser.add_argument("--rank", choices=["gate", "speed"])
    parser.add_argument("--given")
    given = parser.parse_args()
    if given.rank:
        told = json.loads(given.given)
        shape = tuple(told.pop("shape"))
        rank(given.rank, Case(**{**told, "overrides": tuple(told["overrides"])}), shape, given.out)
        return 0
    case = Case(given.geometry, *given.pack, layers=given.layers, warm=1, overrides=tuple(given.override))
    found = measure(case, tuple(given.gate), given.out, given.seconds)
    return 0 if "per_gpu_at_2_over_1" in found else 1


if __name__ == "__main__":
    sys.exit(main())
