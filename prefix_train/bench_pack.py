"""A pack of a large model's geometry on one GPU: whole updates with random weights, timed, beside the same examples
alone and beside FlexAttention.

Each row runs in a process of its own, so that its first update is a cold one and its peak memory its own. No row runs
before the gate has passed: packs against transformers' own unpatched model over the same examples, in float32 and, 64
examples, in bfloat16, at the geometry's own head sizes.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from configs import compose
from configs.errors import UserError
from configs.schema import Config
from prefix_train import anatomy, bench_rows, budget, gradients, kernels, offload, outcome, tiny, verify
from prefix_train import model as models
from prefix_train.bench import random_examples, star
from prefix_train.bench_rows import GATE
from prefix_train.collate import Batch, collate, entry_weights
from prefix_train.dist import Ranks
from prefix_train.geometry import Geometry, read_config
from prefix_train.packing import standalone
from prefix_train.step import Stepper, update

ROWS = ("packed", "standalone", "flex")
"""`packed`: the pack with the configuration's kernels. `standalone`: its first examples, each alone, with the same.
`flex`: the pack with FlexAttention."""

CPU_PARAMETERS = 100_000_000
"""Most parameters of a model that is measured without a GPU."""

SMALL = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096}
"""What the gate's model has instead of the geometry's sizes; heads keep theirs."""
SHAPES = {"float32": (330, 64, 47), "bfloat16": (330, 64, 1001)}
"""Prefix, continuations and their tokens in the gate, no multiple of a kernel's block. In bfloat16 each token's loss is
off by about 1%: only over many targets are means comparable to 0.0002."""

TORCH_FUNCTIONS = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
"""What transformers' models call by these names, and replace by faster kernels where those are installed."""


@dataclass(frozen=True)
class Case:
    """What is measured. alone: examples that run in a standalone row. warm: updates after the first. peak_tflops: what
    utilisation is a share of; 989 is an H100's or H200's data sheet for dense bfloat16. profile: one more update tells
    which kernels ran."""

    geometry: str
    prefix: int
    continuations: int
    length: int
    layers: int | None = None
    warm: int = 2
    alone: int = 4
    peak_tflops: float = 989.0
    profile: bool = True
    overrides: tuple[str, ...] = ()

    def config(self) -> Config:
        """The geometry's configuration with this case's changes."""
        config = compose.load(geometry_file(self.geometry), self.overrides)
        build = dict(config.model.build)
        if self.layers is not None:
            build["num_hidden_layers"] = self.layers
        pack = dataclasses.replace(config.pack, max_positions=self.prefix + self.continuations * self.length)
        return dataclasses.replace(config, pack=pack, model=dataclasses.replace(config.model, build=build))


def geometry_file(name: str) -> Path:
    """A configuration by its name in configs/geometries, or by its path. UserError names those that there are."""
    folder = Path(compose.__file__).parent / "geometries"
    path = folder / f"{name}.yaml"
    if path.is_file():
        return path
    if Path(name).is_file():
        return Path(name)
    known = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
    raise UserError(f"--geometry {name}: neither a file nor one of {known}")


def continuations(text: str) -> tuple[int, int]:
    """`80x1000`: so many examples, and tokens of each."""
    count, _, length = text.partition("x")
    if not (count.isdecimal() and length.isdecimal() and int(count) and int(length)):
        raise UserError(f"--continuations {text!r}: write COUNTxTOKENS, as in 80x1000")
    return int(count), int(length)


def bench(case: Case, rows: tuple[str, ...], out: Path) -> dict[str, Any]:
    """Run the gate, then each of `rows`, and write all of it to `out` after each.

    Rows that `out` has already stay, the same row excepted; so does a gate of the same geometry that has passed.
    Raises UserError where `out` holds something else or cannot be written, and where there is no GPU for a geometry of
    this size; RuntimeError where the gate or a row fails.
    """
    require_gpu(case.config())
    found, gated = bench_rows.read(out), {"geometry": case.geometry, "overrides": list(case.overrides)}
    bench_rows.write(out, found)
    if not found[GATE].get("passed") or found[GATE].get("of") != gated:
        found[GATE] = {"of": gated, **_in_a_process(GATE, case)}
        bench_rows.write(out, found)
    if not found[GATE]["passed"]:
        raise RuntimeError(f"no figure without the correctness gate: see {out}")
    for row in rows:
        measured = {"row": row, **_in_a_process(row, case)}
        same = (row, measured["case"])
        found["rows"] = [*(old for old in found["rows"] if (old["row"], old["case"]) != same), measured]
        found["ratios"] = bench_rows.ratios(found["rows"])
        bench_rows.write(out, found)
    return found


def require_gpu(config: Config) -> None:
    """Raise UserError where this machine's CPU would have to train more than a test's model."""
    parameters = sum(Geometry.of(read_config(config.model)).parameters.values())
    if not torch.cuda.is_available() and parameters > CPU_PARAMETERS:
        raise UserError(
            f"a geometry of {parameters:,} parameters is measured on a GPU, and there is no CUDA device here; "
            "on a CPU: prefix-train bench cpu"
        )


def _in_a_process(row: str, case: Case) -> dict[str, Any]:
    program = [sys.executable, "-m", "prefix_train.bench_pack", row, json.dumps(asdict(case))]
    ran = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{row}: the measuring process ended with status {ran.returncode}")
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def gate(case: Case, device: torch.device) -> dict[str, Any]:
    """Packs against transformers' own model, one example at a time, at the geometry's head sizes.

    In float32 both sides run plain torch where recurrence is: flash-linear-attention's kernels multiply in TF32.
    """
    parts: dict[str, Any] = {name: _agreement(case.config(), name, device) for name in ("float32", "bfloat16")}
    return {"passed": all(part["passed"] for part in parts.values()), **parts}


def _agreement(config: Config, dtype: Literal["float32", "bfloat16"], device: torch.device) -> dict[str, Any]:
    build = {**config.model.build, **SMALL}
    adapter = dataclasses.replace(config.adapter, dropout=0.0)
    deltanet: Any = "reference" if dtype == "float32" else config.model.deltanet
    model_config = dataclasses.replace(config.model, build=build, dtype=dtype, deltanet=deltanet)
    small = dataclasses.replace(config, adapter=adapter, model=model_config)
    model = models.adapt(build_on(device, build, models.DTYPES[dtype]), small)
    draw_adapters(model)
    prefix, count, length = SHAPES[dtype]
    examples = random_examples(prefix, count, length, SMALL["vocab_size"], config.seed)
    with plain_torch(anatomy.find(model).decoder) if dtype == "float32" else nullcontext():
        alone = verify.standalone(model, examples)
    models.make_ready(model, small)
    root = models.Root(model, models.DTYPES[dtype], config.train.loss_chunk_rows, images=False)
    packed = verify.packed(root, [star(examples, prefix)], examples)
    bounds = verify.bounds_for(config.verify, models.DTYPES[dtype])
    return {**verify.compare(packed, alone, bounds), "kernels": outcome.kernels(small, device)}


@contextmanager
def plain_torch(decoder: torch.nn.Module) -> Iterator[None]:
    """Let transformers' model run its own torch functions, also where faster ones are installed."""
    holder = sys.modules[type(decoder).__module__]
    before = {name: getattr(holder, name) for name in TORCH_FUNCTIONS if hasattr(holder, name)}
    try:
        for name, function in before.items():
            setattr(holder, name, inspect.unwrap(function))
        yield
    finally:
        for name, function in before.items():
            setattr(holder, name, function)


def draw_adapters(model: torch.nn.Module) -> None:
    """Give LoRA's second factors, zero at first, values: else the first ones would have no gradient to compare."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in anatomy.trainable(model).items():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def build_on(device: torch.device, build: dict[str, Any], dtype: torch.dtype) -> Any:
    """A text model with random weights, drawn on `device` in `dtype`: 27B parameters do not fit a host in float32."""
    with torch.device(device):
        return tiny.build_model(build, seed=0, dtype=dtype, drawn_in=dtype)


class Row:
    """A geometry's model on one GPU and its batches, ready for updates."""

    def __init__(self, name: str, case: Case, device: torch.device) -> None:
        config = case.config()
        if name == "flex":
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="flex"))
        self.name, self.case, self.config, self.device = name, case, config, device
        dtype = models.DTYPES[config.model.dtype]
        model = models.prepare(build_on(device, dict(config.model.build), dtype), config)
        self.root = models.Root(model, dtype, config.train.loss_chunk_rows, images=False).to(device)
        self.offload = offload.attach(self.root, config, device)
        vocabulary = anatomy.find(model).head.out_features
        examples = random_examples(case.prefix, case.continuations, case.length, vocabulary, config.seed)
        weights = entry_weights("example", [int(example.target.sum()) for example in examples])
        packs = [star(examples, case.prefix)]
        if name == "standalone":
            packs = [standalone(index, len(example.ids)) for index, example in enumerate(examples[: case.alone])]
        self.packs = packs
        self.batches: list[Batch] = [collate(pack, examples, weights) for pack in packs]
        parameters = anatomy.trainable(model)
        optimizer = torch.optim.AdamW(parameters.values(), lr=1e-5)
        coverage = gradients.Coverage(list(parameters), frozenset(), config.train.warmup_updates)
        ranks = Ranks(0, 1, device, None)
        self.stepper = Stepper(self.root, parameters, optimizer, ranks, coverage, config.seed, config.train.clip_norm)
        self.adapters = sum(parameter.numel() for parameter in parameters.values())

    def run(self) -> None:
        """One whole update."""
        update(self.stepper, 1, 1e-5, self.batches)

    def flops(self) -> tuple[int, int]:
        """Model FLOPs of an update, and those of the recomputation: `budget.model_flops` says what they count."""
        geometry = Geometry.of(read_config(self.config.model))
        model = again = 0
        for pack, batch in zip(self.packs, self.batches, strict=True):
            shape = budget.Shape.of(pack.lengths, pack.parents, len(batch.targets.rows))
            model += budget.model_flops(geometry, shape, "adapter", self.adapters)
            again += budget.recomputed_flops(geometry, shape) if self.config.memory.recompute else 0
        return model, again


def measure(name: str, case: Case, device: torch.device) -> dict[str, Any]:
    """One row."""
    ceiling = matrix_ceiling(device)
    pins = kernels.use_pins(dtype=case.config().model.dtype)
    compiled = kernels.compile_ahead(case.config(), device) if device.type == "cuda" else 0.0
    row = Row(name, case, device)
    weights = _allocated(device)
    _reset_peak(device)
    first = seconds(row.run, device)
    if row.offload is not None:
        row.offload.figures()  # the first update copies while kernels compile
    warm = [seconds(row.run, device) for _ in range(case.warm)]
    median = statistics.median(warm)
    model, again = row.flops()
    positions, logical = (sum(getattr(pack, what) for pack in row.packs) for what in ("positions", "logical"))
    peak = case.peak_tflops * 1e12
    found = {
        "case": asdict(case),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__},
        "pins": pins,
        "compiled_ahead_s": compiled,
        "kernels": outcome.kernels(row.config, device),
        "ceiling_tflops": ceiling,
        "examples": len(row.packs) if name == "standalone" else case.continuations,
        "first_s": first,
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
        "memory": _memory(device, weights) | _host(row.offload),
    }
    if name == "standalone":
        found["all_s"] = median * case.continuations / len(row.packs)
    return found | ({"launched": launched(row.run, device)} if case.profile else {})


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


def launched(run: Callable[[], None], device: torch.device, most: int = 40) -> list[dict[str, Any]]:
    """The kernels of one update that take the most time of the device."""
    if device.type != "cuda":
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        _synchronize(device)
    kernels_seen = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    kernels_seen.sort(key=lambda event: -event.self_device_time_total)
    return [
        {"kernel": event.key[:200], "calls": event.count, "s": event.self_device_time_total / 1e6}
        for event in kernels_seen[:most]
    ]


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
    """Pinned memory in use at most, the process's own peak, and what share of the copying no computing waited for."""
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
    row, told = sys.argv[1], json.loads(sys.argv[2])
    case = Case(**{**told, "overrides": tuple(told["overrides"])})
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    found = gate(case, device) if row == GATE else measure(row, case, device)
    print(json.dumps(found, allow_nan=False))


if __name__ == "__main__":
    main()
