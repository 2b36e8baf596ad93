"""What one of N ranks does for `tests.bench.gpu_sharded`, W packs to an update: gradients, resuming, times.

The packs of an update are the same whatever N is: of N ranks each has W / N of them.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from configs.schema import Config
from prefix_train import anatomy, bench_gate, bench_measure, budget, checkpoint, gradients, offload, shard, step
from prefix_train import model as models
from prefix_train.bench import random_examples, star
from prefix_train.bench_pack import Case
from prefix_train.collate import Batch, collate, entry_weights
from prefix_train.dist import Ranks
from prefix_train.geometry import Geometry, read_config

UPDATES = 2
"""Before the save, and as many after it: Adam's moments exist from the first on and count from the second."""

RATE = 1e-3


def gate_config(case: Case, device: torch.device) -> Config:
    """The geometry at the gate's sizes, in float32, nothing dropped."""
    config = case.config()
    model = dataclasses.replace(config.model, build={**config.model.build, **bench_gate.SMALL})
    model = bench_gate.in_float32(model, device)
    adapter = dataclasses.replace(config.adapter, dropout=0.0)
    train = dataclasses.replace(config.train, clip_norm=0.0)
    return dataclasses.replace(config, model=model, adapter=adapter, train=train)


def batches_of(config: Config, shape: tuple[int, int, int], packs: int, mine: range) -> list[Batch]:
    """Of an update of so many packs: those of `mine`. shape: prefix, continuations, their length."""
    prefix, count, length = shape
    vocabulary = int(config.model.build["vocab_size"])
    examples = [random_examples(prefix, count, length, vocabulary, number) for number in range(packs)]
    weights = entry_weights("example", [int(one.target.sum()) for pack in examples for one in pack])
    return [collate(star(examples[number], prefix), examples[number], weights) for number in mine]


def share(ranks: Ranks, packs: int) -> range:
    """Packs of this rank. ValueError where not all ranks would have as many."""
    if packs % ranks.world:
        raise ValueError(f"{packs} packs are not the same number for each of {ranks.world} ranks")
    each = packs // ranks.world
    return range(ranks.rank * each, (ranks.rank + 1) * each)


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


def whole(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Full ones, copied to the host."""
    full = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in tensors.items()}
    return {name: one.detach().to("cpu", copy=True).contiguous() for name, one in full.items()}


def gate(case: Case, shape: tuple[int, int, int], packs: int, ranks: Ranks, out: Path) -> dict[str, Any]:
    """Gradients of small packs into `out`.safetensors."""
    config = gate_config(case, ranks.device)
    run = stepper(config, ranks)
    result = step.update(run, 0, 0.0, batches_of(config, shape, packs, share(ranks, packs)))
    found = whole({name: parameter.grad for name, parameter in run.parameters.items()})
    if ranks.rank == 0:
        save_file(found, out.with_suffix(".safetensors"))
    return {"loss": result.loss, "norm": result.norm, "positions": result.positions}


def run_beside(out: Path) -> Path:
    """The folder of the save that all parts of one bench share."""
    return out.parent / "resumed"


def resume(case: Case, shape: tuple[int, int, int], packs: int, ranks: Ranks, out: Path) -> dict[str, Any]:
    """Some updates, a save and as many again; where there is a save already, those after it alone.

    What each trained tensor has moved by then goes into `out`.safetensors.
    """
    config, run = gate_config(case, ranks.device), run_beside(out)
    one = stepper(config, ranks)
    begun = whole(dict(one.parameters))
    batches = batches_of(config, shape, packs, share(ranks, packs))
    saved = checkpoint.latest(run) if run.exists() else None
    ranks.barrier()
    told = {"resumed": ""}
    if saved is not None:
        told["resumed"] = checkpoint.load(saved, ranks, one.parameters, one.optimizer, config).line
    for number in range(0 if saved is None else UPDATES, 2 * UPDATES):
        step.update(one, number, RATE, batches)
        if number + 1 == UPDATES:
            place = checkpoint.Cursor(update=UPDATES, epoch=0, done=UPDATES, plan="a" * 64)
            checkpoint.save(run, ranks, one.parameters, one.optimizer, place, config)
    ended = whole(dict(one.parameters))
    if ranks.rank == 0:
        save_file({name: ended[name] - begun[name] for name in ended}, out.with_suffix(".safetensors"))
    return told


def speed(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Seconds of whole updates with one pack on each rank."""
    config, device = case.config(), ranks.device
    batches = batches_of(config, (case.prefix, case.continuations, case.length), ranks.world, share(ranks, ranks.world))
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
        "model_utilisation": model_flops(case, config, run) / median / (case.peak_tflops * 1e12),
    }  # fmt: skip
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return found


def model_flops(case: Case, config: Config, run: step.Stepper) -> int:
    """Of an update's pack, as `budget.model_flops` counts."""
    shape = (case.prefix, case.continuations, case.length)
    examples = random_examples(*shape, int(config.model.build["vocab_size"]), 0)
    pack = star(examples, case.prefix)
    sized = budget.Shape.of(pack.lengths, pack.parents, sum(int(one.target.sum()) for one in examples))
    adapters = sum(parameter.numel() for parameter in run.parameters.values())
    return budget.model_flops(Geometry.of(read_config(config.model)), sized, "adapter", adapters)
