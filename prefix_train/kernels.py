"""Kernels that search for their fastest configuration: which a job launches, what is pinned, and the proof.

A search takes seconds to minutes per kernel and memory that a full pack does not leave. So the winners are recorded
(`prefix-train tune`, `configs/kernel_pins.py`), used by every rank, and proved: all kernels of the job run at their
real widths, in every length bucket that its packs can reach, and searches are counted.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from configs import kernel_pins
from configs.errors import UserError
from configs.schema import Config
from configs.wording import counted
from prefix_train import budget, compiling, lengths, machine, trial
from prefix_train.geometry import Geometry, read_config
from prefix_train.layer_bytes import mixer_bytes
from prefix_train.stream import planner

MODULES = ("fla.modules.causal_conv1d", "fla.modules.norm.l2norm", "fla.ops.gated_delta_rule")
"""What holds the kernels of `flash_linear`."""

CONVOLUTION = "causal_conv1d_"
"""How the names of flash-linear-attention's convolution kernels begin."""

ANOTHER_CONVOLUTION = ("fla_forest", "fla_cuda")
"""Kernels of Gated DeltaNet that launch none of these: their pins are right for the rest."""

BUCKET = 65536
"""Rows (tokens x heads) of one length bucket: FLA's key `NB` of its L2 norm (fla/modules/norm/l2norm.py of 0.6.0)."""


@dataclass
class Launches:
    """What ran while `watched`: every kernel that could search, by name, and how often each did."""

    autotuners: dict[str, Any] = field(default_factory=dict)
    searches: Counter[str] = field(default_factory=Counter)


def versions() -> dict[str, str]:
    """The imported Triton and FLA. UserError where they cannot be imported."""
    try:
        return {name: str(importlib.import_module(name).__version__) for name in ("triton", "fla")}
    except ImportError as error:
        raise UserError(f"kernel pins need Triton and flash-linear-attention: {error}") from error


def use_pins(pins: Path | None = None, dtype: str = "bfloat16") -> str:
    """Let every kernel of this process use its pinned configuration; says what was done, in one line.

    pins: a folder, by default that of this GPU's model. dtype: the model's; a choice made for 16 bits may ask for more
    shared memory in 32 than there is. Where the folder is not whole or not made for what is here nothing is pinned, and
    the line says why. Must come before `fla` is imported: FLA reads its mode once.
    """
    if not torch.cuda.is_available():
        return "kernels: no CUDA device, nothing to pin"
    if importlib.util.find_spec("fla") is None:
        return "kernels: flash-linear-attention is not installed, nothing to pin"
    gpu = torch.cuda.get_device_name()
    pins = pins or kernel_pins.folder(gpu)
    if not pins.is_dir():
        return f"kernels: none pinned for {gpu} ({pins} does not exist): each searches once"
    if "fla" in sys.modules and os.environ.get("FLA_CACHE_MODE") != "default":
        raise RuntimeError("fla was imported before its pins could be set")
    os.environ |= kernel_pins.environment(pins)
    found = {**versions(), "dtype": dtype}
    if wrong := kernel_pins.problems(pins, gpu, found):
        del os.environ["FLA_CONFIG_DIR"]
        reasons = "; ".join(f"{kernel}: {why}" for kernel, why in wrong.items())
        return f"kernels: not pinned ({reasons}): each searches once"
    listed = kernel_pins.read_list(pins)["kernels"]
    pin_plain([kernel for kernel, entry in listed.items() if entry["kind"] == "triton"], pins)
    return f"kernels: {len(listed)} pinned for {gpu}, Triton {found['triton']}"


def pin_plain(kernels: Sequence[str], pins: Path) -> None:
    """Make each kernel's recorded winner its only configuration. UserError names one that does not exist."""
    import triton

    here = dict(autotuners())
    for kernel in kernels:
        if kernel not in here:
            raise UserError(f"{pins}: {kernel} is pinned, but no such kernel is here: run `prefix-train tune` again")
        config = kernel_pins.read_config(pins, kernel)
        rest = {name: config[name] for name in ("num_warps", "num_stages", "num_ctas")}
        here[kernel].configs = [triton.Config(config["kwargs"], **rest)]
        here[kernel].cache.clear()


def autotuners() -> Iterator[tuple[str, Any]]:
    """Every kernel under an autotuner in what MODULES have imported, by the name of its function."""
    from triton.runtime.autotuner import Autotuner

    for module in MODULES:
        importlib.import_module(module)
    for name in sorted(name for name in sys.modules if name.startswith("fla.")):
        for value in list(vars(sys.modules[name]).values()):
            while value is not None and type(value).__module__.startswith(("triton.", "fla.")):
                if isinstance(value, Autotuner):
                    yield name_of(value), value
                    break
                value = getattr(value, "fn", None)


def name_of(autotuner: Any) -> str:
    """The name of the function that an autotuner wraps."""
    return str(autotuner.base_fn.__name__)


def kind_of(autotuner: Any) -> str:
    """`fla`: reads pins itself; `triton`: does not."""
    return "fla" if type(autotuner).__name__ == "CachedAutotuner" else "triton"


@contextmanager
def watched() -> Iterator[Launches]:
    """Record every launch under an autotuner, and every search: Triton prunes configurations only to search them."""
    from triton.runtime.autotuner import Autotuner

    launches = Launches()
    run, prune = Autotuner.run, Autotuner.prune_configs

    def watch_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.autotuners[name_of(self)] = self
        return run(self, *args, **kwargs)

    def watch_prune(self: Any, kwargs: Any) -> Any:
        launches.searches[name_of(self)] += 1
        return prune(self, kwargs)

    Autotuner.run, Autotuner.prune_configs = watch_run, watch_prune
    try:
        yield launches
    finally:
        Autotuner.run, Autotuner.prune_configs = run, prune


def searching_kernels(config: Config, device: torch.device) -> Geometry | None:
    """The model's sizes, where its layers run kernels that search; else None."""
    geometry = Geometry.of(read_config(config.model))
    if not geometry.count("linear_attention") or machine.chosen(config, device, geometry).deltanet == "reference":
        return None
    return geometry


def buckets(geometry: Geometry, most: int) -> list[int]:
    """Tokens, ascending, one number for each length bucket that packs of up to `most` positions can reach."""
    heads = int(geometry.text["linear_num_key_heads"])
    count = -(-most * heads // BUCKET)
    return sorted({max(trial.LEAST, min(most, bucket * BUCKET // heads)) for bucket in range(1, count + 1)})


def compile_ahead(config: Config, device: torch.device) -> float:
    """Compile the job's kernels side by side, which the first update would do one after the other; seconds taken.

    Comes after `use_pins`. What is not pinned is left to its first launch. Random states stay as they are.
    """
    geometry = searching_kernels(config, device)
    pinned = geometry is not None and "FLA_CONFIG_DIR" in os.environ
    fused = machine.chosen(config, device, geometry).heads == "fused"
    if not pinned and not fused:
        return 0.0
    began = time.monotonic()
    with suppress(compiling.WouldSearch), torch.random.fork_rng([device]), compiling.without_launching():
        if fused:
            trial.heads_of_attention(config, device)
        if geometry is not None and pinned:
            trial.delta_net(config, geometry, trial.LEAST, device)
    torch.cuda.synchronize(device)
    return time.monotonic() - began


def prove(config: Config, pins: Path | None = None) -> dict[str, Any]:
    """Run every kernel of the job and count searches.

    An update of the model's distinct layers over a short pack, then the kernels that search in every length bucket,
    with the memory that the run's largest pack leaves.

    Returns {passed, said, launched, searches, problems, kernels}. Must run in a process that has not imported `fla`.
    UserError without CUDA: nothing would have been proved.
    """
    if not torch.cuda.is_available():
        raise UserError("kernels are proved on the GPU that will run them: there is no CUDA device here")
    said = use_pins(pins, config.model.dtype)
    device = torch.device("cuda", 0)
    geometry = searching_kernels(config, device)
    if geometry is None:
        return {"passed": True, "said": said, "launched": [], "searches": {}, "problems": {},
                "kernels": str(machine.chosen(config, device))}  # fmt: skip
    pins = pins or kernel_pins.folder(torch.cuda.get_device_name())
    wrong: dict[str, str] = {}
    compile_ahead(config, device)
    with watched() as launches:
        try:
            trial.whole_update(config, trial.LEAST, device)
            gc.collect()  # a patched model refers to itself
            torch.cuda.empty_cache()
            leave_what_a_pack_leaves(config, geometry, device)
            for tokens in buckets(geometry, config.pack.max_positions):
                trial.delta_net(config, geometry, tokens, device)
            torch.cuda.synchronize(device)
        except torch.OutOfMemoryError as error:
            wrong["memory"] = str(error).splitlines()[0]
    listed = set(kernel_pins.read_list(pins)["kernels"]) if (pins / kernel_pins.LIST).is_file() else set()
    wanted = wanted_pins(listed, machine.chosen(config, device, geometry).deltanet)
    launched, problems = judge_launches(launches, wanted, wrong)
    return {"passed": not problems, "said": said, "launched": launched, "searches": dict(launches.searches),
            "problems": problems, "kernels": str(machine.chosen(config, device, geometry))}  # fmt: skip


def wanted_pins(listed: Set[str], deltanet: str) -> Set[str]:
    """Those of the pinned kernels that a job with these kernels of Gated DeltaNet launches. Pure."""
    return {name for name in listed if deltanet not in ANOTHER_CONVOLUTION or not name.startswith(CONVOLUTION)}


def judge_launches(
    launches: Launches, listed: Set[str], cut_short: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The kernels that could search; and what is wrong, by kernel: nothing where each is pinned and none searched.

    listed: kernels that the pins name. cut_short: why not all of the job's kernels ran, if so. Pure.
    """
    wrong = {
        **cut_short,
        **{kernel: f"searched {counted(count, 'time')}" for kernel, count in sorted(launches.searches.items())},
    }
    # An autotuner of one configuration has nothing to search and needs no pin.
    launched = {name for name, autotuner in launches.autotuners.items() if name in listed or len(autotuner.configs) > 1}
    wrong |= dict.fromkeys(sorted(launched - listed - wrong.keys()), "launched, but not pinned")
    if not wrong:
        wrong |= dict.fromkeys(sorted(listed - launched), "pinned, but not launched: made for another set")
    return sorted(launched), wrong


def leave_what_a_pack_leaves(config: Config, geometry: Geometry, device: torch.device) -> None:
    """Limit this process to the device's memory (to the budget, if weights stream) less the largest pack's, but for the
    layer that runs here."""
    planned = lengths.exists(config) if config.data.train else False
    shape = lengths.largest_pack(config, lengths.load(config)) if planned else None
    plan = planner.make(config, shape) if config.engine == "stream" else None
    found = budget.predict(config, shape, machine.of(device)) if plan is None else plan.budget
    layer = mixer_bytes(geometry, "linear_attention", found.shape, budget.ITEMSIZE[config.model.dtype])
    total = torch.cuda.get_device_properties(device).total_memory
    left = (total if plan is None else plan.limit) - (found.total("gpu") - layer)
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, left / total)), device)


def describe(found: dict[str, Any]) -> str:
    """The proof for a person."""
    lines = [
        found["said"],
        f"{counted(len(found['launched']), 'kernel')} that could search: {', '.join(found['launched'])}",
    ]
    lines += [f"{kernel}: {why}" for kernel, why in found["problems"].items()]
    return "\n".join((*lines, "proved: none searched" if found["passed"] else "NOT proved"))
