"""One row of the pack bench, measured in a process of its own.

What begins is said on standard error, with seconds when it has ended; what is known so far goes to standard output, a
JSON line each time, the last one being the whole row.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from prefix_train import (
    anatomy,
    bench_gate,
    bench_kernels,
    budget,
    dropout,
    gradients,
    kernels,
    machine,
    offload,
    outcome,
)
from prefix_train import model as models
from prefix_train.bench import random_examples, star
from prefix_train.bench_pack import Case
from prefix_train.bench_rows import GATE
from prefix_train.collate import Batch, collate, entry_weights
from prefix_train.dist import Ranks
from prefix_train.geometry import Geometry, read_config
from prefix_train.packing import standalone
from prefix_train.step import Stepper, update


class Watch:
    """Says what a row does and how long each phase took. seconds: of each that has ended, by name."""

    def __init__(self, row: str, device: torch.device) -> None:
        self.row, self.device, self.seconds = row, device, dict[str, float]()
        self._update: str | None = None
        self._began, self._now = time.perf_counter(), ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within it `name` is done; the device's work is waited for at its end."""
        self._begin(name)
        yield
        self._end()

    @contextmanager
    def of_update(self, which: str) -> Iterator[None]:
        """An update whose phases are told apart: at each one's end it waits for the device."""
        self._update = which
        yield
        if self._now:
            self._end()
        self._update = None

    def in_update(self, name: str, pack: int) -> None:
        """What `Stepper.phase` calls; says something within `of_update` alone, once for all packs of a phase."""
        if self._update is None or self._now == f"{self._update}, {name}":
            return
        if self._now:
            self._end()
        self._begin(f"{self._update}, {name}")

    def say(self, text: str) -> None:
        """A line of its own."""
        print(f"{self.row}: {text}", file=sys.stderr, flush=True)

    def _begin(self, name: str) -> None:
        print(f"{self.row}: {name} ...", end="", file=sys.stderr, flush=True)
        self._began, self._now = time.perf_counter(), name

    def _end(self) -> None:
        _synchronize(self.device)
        spent = time.perf_counter() - self._began
        self.seconds[self._now] = self.seconds.get(self._now, 0.0) + spent
        self._now = ""
        print(f" {spent:.2f} s", file=sys.stderr, flush=True)


class Row:
    """A geometry's model on one GPU and its batches, ready for updates."""

    def __init__(self, name: str, case: Case, device: torch.device, watch: Watch | None = None) -> None:
        watch = watch or Watch(name, device)
        config = case.config()
        if name == "flex":
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="flex"))
        dtype = models.DTYPES[config.model.dtype]
        with watch.phase("drawing weights"):
            base = bench_gate.build_on(device, dict(config.model.build), dtype)
        with watch.phase("adapters and patches"):
            model = models.prepare(base, config)
            self.root = models.Root(model, dtype, config.train.loss_chunk_rows, images=False).to(device)
        with watch.phase("examples"):
            vocabulary = anatomy.find(model).head.out_features
            examples = random_examples(case.prefix, case.continuations, case.length, vocabulary, config.seed)
            weights = entry_weights("example", [int(example.target.sum()) for example in examples])
            packs = [star(examples, case.prefix)]
            if name == "standalone":
                packs = [standalone(index, len(example.ids)) for index, example in enumerate(examples[: case.alone])]
            self.batches: list[Batch] = [collate(pack, examples, weights) for pack in packs]
        most = dataclasses.replace(config.pack, max_positions=max(pack.positions for pack in packs))
        self.name, self.case, self.device, self.packs = name, case, device, packs
        self.config = dataclasses.replace(config, pack=most)
        with watch.phase("pinning host memory"):
            self.offload = offload.attach(self.root, self.config, device)
        parameters = anatomy.trainable(model)
        optimizer = torch.optim.AdamW(parameters.values(), lr=1e-5)
        coverage = gradients.Coverage(list(parameters), frozenset(), config.train.warmup_updates)
        ranks = Ranks(0, 1, device, None)
        self.stepper = Stepper(
            self.root, parameters, optimizer, ranks, coverage, config.seed, config.train.clip_norm,
            phase=watch.in_update,
        )  # fmt: skip
        self.adapters = sum(parameter.numel() for parameter in parameters.values())

    def run(self) -> None:
        """One whole update."""
        update(self.stepper, 1, 1e-5, self.batches)

    def shapes(self) -> list[budget.Shape]:
        """Of each pack."""
        return [
            budget.Shape.of(pack.lengths, pack.parents, len(batch.targets.rows))
            for pack, batch in zip(self.packs, self.batches, strict=True)
        ]

    def flops(self) -> tuple[int, int]:
        """Model FLOPs of an update, and those of the recomputation: `budget.model_flops` says what they count."""
        geometry = Geometry.of(read_config(self.config.model))
        model = again = 0
        for shape in self.shapes():
            model += budget.model_flops(geometry, shape, "adapter", self.adapters)
            again += budget.recomputed_flops(geometry, shape) if self.config.memory.recompute else 0
        return model, again

    def predicted(self) -> dict[str, float]:
        """What `prefix-train budget` says before the run: the peak on the GPU, and pinned memory of the host."""
        largest = max(self.shapes(), key=lambda shape: shape.positions)
        found = budget.predict(self.config, largest, machine.of(self.device))
        return {
            "predicted_peak_gib": found.total("gpu") / budget.GIB,
            "predicted_pinned_gib": found.total("host") / budget.GIB,
        }


def measure(
    name: str,
    case: Case,
    device: torch.device,
    watch: Watch | None = None,
    tell: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """One row. tell: given what is known of it so far, whenever something is added."""
    watch = watch or Watch(name, device)
    with watch.phase("matrix products"):
        ceiling = matrix_ceiling(device)
    pins = kernels.use_pins(dtype=case.config().model.dtype)
    watch.say(pins)
    with watch.phase("compiling ahead"):
        compiled = kernels.compile_ahead(case.config(), device) if device.type == "cuda" else 0.0
    row = Row(name, case, device, watch)
    found: dict[str, Any] = {
        "case": asdict(case),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__},
        "pins": pins,
        "compiled_ahead_s": compiled,
        "kernels": outcome.kernels(row.config, device),
        "ceiling_tflops": ceiling,
        "examples": len(row.packs) if name == "standalone" else case.continuations,
        "phases_s": watch.seconds,
    }
    tell(found)
    weights = _allocated(device)
    _reset_peak(device)
    with watch.of_update("first update"):
        found["first_s"] = seconds(row.run, device)
    found["kernels"] = outcome.kernels(row.config, device, dropout.counted_masks(row.root))
    found["memory"] = _memory(device, weights) | _host(row.offload) | row.predicted()
    tell(found)
    warm: list[float] = []
    for number in range(case.warm):
        with watch.phase(f"warm update {number + 1}"):
            warm.append(seconds(row.run, device))
        found |= _figures(row, warm)
        found["memory"] = _memory(device, weights) | _host(row.offload) | row.predicted()
        tell(found)
    if case.profile:
        with watch.phase("one more update, profiled"):
            found |= bench_kernels.launched(row.run, device)
    return found


def _figures(row: Row, warm: list[float]) -> dict[str, Any]:
    """What the warm updates so far say."""
    median, case = statistics.median(warm), row.case
    model, again = row.flops()
    positions, logical = (sum(getattr(pack, what) for pack in row.packs) for what in ("positions", "logical"))
    peak = case.peak_tflops * 1e12
    found = {
        "median_s": median,
        "min_s": min(warm),
        "max_s": max(warm),
        "positions": positions,
        "positions_per_s": positions / median,
        "logical_per_s": logical / median,
        "model_flops": model,
        "hardware_flops": model + again,
        "model_tflops": model / median / 1e12,
        "model_utilisation": model / median / peak,
        "hardware_utilisation": (model + again) / median / peak,
    }
    return found | ({"all_s": median * case.continuations / len(row.packs)} if row.name == "standalone" else {})


def seconds(run: Callable[[], None], device: torch.device) -> float:
    """Of one run, the device's work included."""
    _synchronize(device)
    began = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - began


def matrix_ceiling(device: torch.device, size: int = 8192, repeats: int = 20) -> float:
    """TFLOP/s of bfloat16 matrix products, read before each row: what the chip gives at this moment."""
    if device.type != "cuda":
        return 0.0
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    product: Tensor = left @ right

    def multiply() -> None:
        for _ in range(repeats):
            torch.mm(left, right, out=product)

    spent = seconds(multiply, device)
    return repeats * 2 * size**3 / spent / 1e12


def _memory(device: torch.device, weights: int) -> dict[str, float]:
    if device.type != "cuda":
        return {"weights_gib": 0.0, "peak_allocated_gib": 0.0, "peak_reserved_gib": 0.0, "above_weights_gib": 0.0}
    gib = budget.GIB
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {
        "weights_gib": weights / gib,
        "peak_allocated_gib": allocated / gib,
        "peak_reserved_gib": reserved / gib,
        "above_weights_gib": (allocated - weights) / gib,
    }


def _host(waiting: offload.Offload | None) -> dict[str, Any]:
    """Pinned memory in use at most, the process's own peak, and what share of the copying no computing waited for since
    this was last asked."""
    found: dict[str, Any] = {"host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / budget.GIB}
    if waiting is not None:
        figures = waiting.figures()
        found |= {"pinned_gib": figures.pinned_peak / budget.GIB, "copied_gib": figures.copied / budget.GIB}
        found |= {"copying_s": figures.copying_s, "stalled_s": figures.stalled_s, "copying_hidden": figures.hidden}
    return found


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure the row that the command line names; its figures are the last line."""
    name, told = sys.argv[1], json.loads(sys.argv[2])
    started = told.pop("started")
    case = Case(**{**told, "overrides": tuple(told["overrides"])})
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    watch = Watch(name, device)
    watch.say(f"imports: {time.time() - started:.1f} s")

    def tell(found: dict[str, Any]) -> None:
        print(json.dumps(found, allow_nan=False), flush=True)

    if name == GATE:
        tell(bench_gate.gate(case.config(), device, watch.phase))
    else:
        tell(measure(name, case, device, watch, tell))


if __name__ == "__main__":
    main()
