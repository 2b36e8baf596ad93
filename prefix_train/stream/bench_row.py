"""Rows of the streaming bench, measured one after the other in a process of their own.

What begins is said on standard error, with seconds when it has ended; what is known so far goes to standard output, a
JSON line each time. A row that fails says so in its last line, and the next one runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from configs.errors import UserError
from configs.schema import Config
from configs.wording import counted
from prefix_train import anatomy, budget, engines, gradients, kernels
from prefix_train.bench import random_examples, star
from prefix_train.bench_measure import Watch, seconds
from prefix_train.bench_rows import GATE
from prefix_train.budget import GIB, Shape
from prefix_train.collate import Batch, collate, entry_weights
from prefix_train.dist import Ranks
from prefix_train.geometry import Geometry, read_config
from prefix_train.packing import Pack, standalone
from prefix_train.step import Stepper, update
from prefix_train.stream import bench_bound, bench_gate, bench_graphs, bench_parts, figures, planner, readings, sources
from prefix_train.stream.bench import ACCUMULATED, PACK, Case, parse
from prefix_train.stream.engine import Streamed
from prefix_train.tensors import digest

LAST = "mlp.down_proj.weight"
"""What a feed-forward's output is the product with; a recomputed layer reads that of no feed-forward."""

REFUSED = 0.9
"""Share of the plan that must be refused."""

Tell = Callable[[dict[str, Any]], None]


class Row:
    """The updates of one row: its packs and configuration, and, once there is a device, what runs them."""

    def __init__(self, name: str, case: Case) -> None:
        self.name, self.case = name, case
        kind, overrides = parse(name)
        config = case.config(overrides)
        self.store = engines.open_store(config)
        sources.require_same(self.store, config.model)
        vocabulary = Geometry.of(read_config(config.model)).vocabulary
        if kind in (PACK, ACCUMULATED):
            examples = random_examples(case.prefix, case.continuations, case.length, vocabulary, config.seed)
        else:
            examples = random_examples(1, 1, int(kind) - 1, vocabulary, config.seed)
        weights = entry_weights("example", [int(example.target.sum()) for example in examples])
        some = examples[: case.alone] if kind == ACCUMULATED else examples
        self.packs: list[Pack] = (
            [star(examples, case.prefix)]
            if kind == PACK
            else [standalone(index, len(example.ids)) for index, example in enumerate(some)]
        )
        self.batches: list[Batch] = [collate(pack, examples, weights) for pack in self.packs]
        self.share = len(examples) / len(some)
        count, most = len(self.packs), max(pack.positions for pack in self.packs)
        self.config: Config = dataclasses.replace(
            config,
            pack=dataclasses.replace(config.pack, max_positions=most, packs_per_update=count),
            stream=dataclasses.replace(config.stream, packs_per_visit=count),
        )
        self.warm = case.warm or (3 if sum(pack.positions for pack in self.packs) <= case.many else 2)

    @property
    def shapes(self) -> list[Shape]:
        """Of each pack."""
        return [
            Shape.of(pack.lengths, pack.parents, len(batch.targets.rows))
            for pack, batch in zip(self.packs, self.batches, strict=True)
        ]

    @property
    def largest(self) -> Shape:
        """Of the largest pack."""
        return max(self.shapes, key=lambda shape: shape.positions)

    def flops(self, adapters: int) -> int:
        """Of an update, recomputation included: `budget.model_flops` says what they count.

        Not what is never computed: in tiles, the feed-forward's last product a second time.
        """
        geometry = Geometry.of(read_config(self.config.model))
        last = sum(block.by_name[LAST].elements for block in self.store.layers if LAST in block.by_name)
        spared = 2 * last if budget.tile_rows(self.config) else 0
        return sum(
            budget.model_flops(geometry, shape, "adapter", adapters)
            + budget.recomputed_flops(geometry, shape)
            - spared * shape.positions
            for shape in self.shapes
        )


class Running:
    """A row's model on the device, streaming."""

    def __init__(self, row: Row, device: torch.device, watch: Watch, found: dict[str, Any]) -> None:
        config, ranks = row.config, Ranks(0, 1, device, None)
        with watch.phase("model and adapters"):
            model = engines.prepare(engines.load(config)[0], config, device)
        with watch.phase("the plan less a tenth"):
            found["refused"] = refused(model, row, ranks, found["plan"])
        with watch.phase("blocks that stay, slots, pinned memory"), contextlib.redirect_stdout(sys.stderr):
            made, _ = engines.make_root(model, config, ranks, False, row.largest)
        assert isinstance(made, Streamed)
        made.limit = None  # a row that takes more is measured, and says so
        self.root, self.row = made, row
        self.parameters = anatomy.trainable(model)
        optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-5)
        coverage = gradients.Coverage(list(self.parameters), frozenset(), config.train.warmup_updates)
        self.stepper = Stepper(
            made, self.parameters, optimizer, ranks, coverage, config.seed, config.train.clip_norm,
            phase=watch.in_update,
        )  # fmt: skip

    def run(self) -> None:
        """One whole update."""
        update(self.stepper, 1, 1e-5, self.row.batches)

    def standing(self) -> None:
        """One whole update that leaves every parameter as it is."""
        update(self.stepper, 1, 0.0, self.row.batches)

    def covered(self) -> int:
        """Blocks, every adapter tensor of which had a gradient in the last update."""
        return sum(
            all(
                parameter.grad is not None and bool(parameter.grad.count_nonzero())
                for parameter in layer.parameters()
                if parameter.requires_grad
            )
            for layer in self.root.anatomy.layers
        )

    def adapters(self) -> int:
        """Trained parameters."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    def digest(self) -> str:
        """Of the trained parameters."""
        return digest(dict(self.parameters))


def refused(model: Any, row: Row, ranks: Ranks, plan: dict[str, Any]) -> dict[str, Any]:
    """What a run with a tenth less memory than the plan, and as many blocks that stay, is told before its first step.

    Raises RuntimeError where it is not refused.
    """
    small = plan["needed_gib"] * REFUSED
    stream = dataclasses.replace(row.config.stream, budget_gib=small, resident_blocks=str(plan["resident_blocks"]))
    config = dataclasses.replace(row.config, stream=stream)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            engines.make_root(model, config, ranks, False, row.largest)
    except UserError as error:
        return {"budget_gib": small, "message": str(error)}
    raise RuntimeError(
        f"a budget of {small:.3f} GiB is too small for a plan of {plan['needed_gib']:.3f}, and was taken"
    )


def measure(
    name: str,
    case: Case,
    device: torch.device,
    tell: Tell = lambda _: None,
    driver: readings.Driver | None = None,
) -> dict[str, Any]:
    """One row. tell: given what is known of it so far, whenever something is added."""
    watch = Watch(name, device)
    with watch.phase("examples"):
        row = Row(name, case)
    found: dict[str, Any] = {
        "case": asdict(case),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": {"torch": torch.__version__},
        "host": row.config.stream.host,
        "plan": plan_of(row),
        "phases_s": watch.seconds,
    }
    tell(found)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    with watch.phase("the link, and a block's matrix products alone"):
        found["link_gb_s"] = bench_bound.link(device)
        found["matrix_tflops"] = bench_bound.matrices(row.store, row.largest.positions, device) / 1e12
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    running = Running(row, device, watch, found)
    try:
        _updates(running, device, watch, found, tell, driver)
    finally:
        running.root.source.close()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what was read ahead is still copied into slots
    return found


def _updates(
    running: Running,
    device: torch.device,
    watch: Watch,
    found: dict[str, Any],
    tell: Tell,
    driver: readings.Driver | None,
) -> None:
    row, root = running.row, running.root
    found["flops"] = row.flops(running.adapters())
    with watch.phase("copies without computing"):
        found["copies_gb_s"] = bench_bound.copies(root, device)
    found["adapters"] = {"before": running.digest()}
    if row.case.cold:
        readings.drop(row.store)
    found["page_cache"] = {"first": readings.cached(row.store)}
    with readings.Peak(device) as peak, watch.of_update("first update"):
        found["first_s"] = seconds(running.run, device)
    found["memory"] = memory(device, found["plan"], driver) | {"device_used_gib": peak.nbytes / GIB}
    tell(found)
    if root.graphs is not None:
        with watch.phase("launches are recorded, and compared with ordinary ones"):
            found["graphs"] = bench_graphs.compare(root, running.standing, running.parameters)
    found["page_cache"]["warm"] = readings.cached(row.store)
    warm, counted = list[float](), bench_parts.allocator(device)
    root.metrics(1.0)
    for number in range(row.warm):
        with watch.phase(f"warm update {number + 1}"):
            warm.append(seconds(running.run, device))
        found |= rates(row, found, warm, root.metrics(warm[-1]))
        tell(found)
    found["allocator"] = bench_parts.changed(counted, bench_parts.allocator(device))
    found["memory"] |= memory(device, found["plan"], driver)
    found["adapters"]["after"] = running.digest()
    found |= {"blocks": len(row.store.layers), "blocks_covered": running.covered()}
    if said := faults(found):
        found["failed"] = said
    if row.case.profile:
        tell(found)
        try:  # what has been measured stands, whatever becomes of this
            with watch.phase("where an update's time goes"):
                found["parts"] = bench_parts.measure(root, running.run, device)
        except RuntimeError as error:
            found["parts_failed"] = f"{type(error).__name__}: {error}"


def plan_of(row: Row) -> dict[str, Any]:
    """The plan, in GiB."""
    plan = planner.make(row.config, row.largest)
    plan.refuse()
    if plan.resident + row.config.stream.slots >= len(plan.files.blocks):
        raise UserError(f"all blocks stay within {plan.limit / GIB:g} GiB: nothing streams; give a lower --budget-gib")
    return {
        "needed_gib": plan.needed / GIB,
        "budget_gib": plan.limit / GIB,
        "resident_blocks": plan.resident,
        "context_gib": (plan.beside + planner.FRAGMENTS) / GIB if row.config.slurm.gpus_per_node else 0.0,
        "read_bytes": plan.reads(),
        "terms_gib": {term.name: term.bytes / GIB for term in plan.budget.at_most("gpu")},
    }


def rates(row: Row, found: dict[str, Any], warm: list[float], metrics: dict[str, float]) -> dict[str, Any]:
    """What the warm updates so far say. metrics: of the last one, which read what each of them reads."""
    median, nbytes = statistics.median(warm), int(metrics["stream_bytes"])
    positions, logical, targets = figures.count(row.batches)
    read, compute = nbytes / max(found["copies_gb_s"]) / 1e9, found["flops"] / found["matrix_tflops"] / 1e12
    bound = max(read, compute)
    counts = {"positions": positions, "logical": logical, "targets": targets}
    return {
        "warm_s": warm,
        "median_s": median,
        "min_s": min(warm),
        "max_s": max(warm),
        **counts,
        **{f"{what}_per_s": number / median for what, number in counts.items()},
        "all_s": median * row.share,
        "read_bytes": nbytes,
        "read_gb_s": nbytes / median / 1e9,
        "bound": {"read_s": read, "compute_s": compute, "s": bound},
        "ratio": median / bound,
        "hidden": max(0.0, min(1.0, (read + compute - median) / min(read, compute))),
        "waited_s": metrics["stream_waited_s"],
        "tflops": found["flops"] / median / 1e12,
    }


def faults(found: dict[str, Any]) -> list[str]:
    """Why a row must not stand as it is."""
    said = []
    if found["adapters"]["before"] == found["adapters"]["after"]:
        said.append("the adapters did not change")
    if found["blocks_covered"] < found["blocks"]:
        said.append(f"{counted(found['blocks'] - found['blocks_covered'], 'block')} without a gradient")
    if not found.get("graphs", {"passed": True})["passed"]:
        said.append(f"gradients of recorded launches are {found['graphs']['gradient']:.1e} away from ordinary ones")
    budget_gib, peak = found["plan"]["budget_gib"], found["memory"]
    if "allocated_gib" in peak and "driver_gib" not in peak:
        said.append("the driver's memory could not be read")
    if (driver := peak.get("driver_gib")) is not None and driver > budget_gib:
        said.append(f"the driver reads {driver:.2f} GiB, and {budget_gib:g} are the budget")
    if peak.get("allocated_gib", 0.0) > found["plan"]["needed_gib"] - found["plan"]["context_gib"]:
        said.append(f"{peak['allocated_gib']:.2f} GiB were allocated at the peak, more than planned")
    return said


def memory(device: torch.device, plan: dict[str, Any], driver: readings.Driver | None) -> dict[str, Any]:
    """Peaks of torch's allocator and the driver's reading, in GiB; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    found: dict[str, Any] = {
        "allocated_gib": torch.cuda.max_memory_allocated(device) / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        "retries": stats.get("num_alloc_retries", 0),
    }
    found["of_plan"] = found["allocated_gib"] / (plan["needed_gib"] - plan["context_gib"])
    if driver is not None:
        nbytes, where = driver.nbytes()
        beside = nbytes - torch.cuda.memory_reserved(device)
        found |= {"driver_gib": nbytes / GIB, "driver_reads": where, "beside_torch_gib": beside / GIB}
    return found


def _one(name: str, case: Case, device: torch.device, tell: Tell, driver: readings.Driver | None) -> None:
    """One row, whatever becomes of it."""
    last: dict[str, Any] = {}

    def keep(found: dict[str, Any]) -> None:
        last.update(found)
        tell({"row": name, "partial": True, **found})

    try:
        tell({"row": name, **measure(name, case, device, keep, driver)})
    except (RuntimeError, UserError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError
        print(f"\n{name}: {error}", file=sys.stderr, flush=True)
        failed = [f"{type(error).__name__}: {error}"]
        tell({"row": name, "partial": True, **last, "failed": failed})
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _driver(device: torch.device) -> readings.Driver | None:
    """None on a CPU, and where the driver does not answer: rows are measured then, and said to have failed."""
    if device.type != "cuda":
        return None
    try:
        return readings.Driver(device)
    except readings.NoReading as error:
        print(error, file=sys.stderr, flush=True)
        return None


def main() -> None:
    """Measure the rows that the command line names."""
    told = json.loads(sys.argv[1])
    case = Case(**{**told["case"], "overrides": tuple(told["case"]["overrides"])})
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    print(f"imports: {time.time() - told['started']:.1f} s", file=sys.stderr, flush=True)

    def tell(found: dict[str, Any]) -> None:
        print(json.dumps(found, allow_nan=False), flush=True)

    if told["rows"] == [GATE]:
        with tempfile.TemporaryDirectory() as folder:
            torch.use_deterministic_algorithms(True, warn_only=True)
            watch = Watch(GATE, device)
            tell({"row": GATE, **bench_gate.gate(case.config(()), device, Path(folder) / "store", watch.phase)})
        return
    driver = _driver(device)
    print(kernels.use_pins(dtype=case.config(()).model.dtype), file=sys.stderr, flush=True)
    for name in told["rows"]:
        _one(name, case, device, tell, driver)


if __name__ == "__main__":
    main()
