"""One program of the comparison in a process of its own: makes it, updates it, and says what was measured as JSON."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from configs.errors import UserError
from prefix_train import kernels
from prefix_train.bench_measure import seconds
from prefix_train.budget import GIB
from prefix_train.compare.case import Case, Maker, Rival, limit
from prefix_train.stream import planner, readings

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "block-streamer")
"""Whose versions are told, of those that are there."""


def maker(name: str) -> Maker:
    """What makes the program of this name. It imports what it needs itself."""
    if name == "ours":
        from prefix_train.compare.ours import Ours

        return Ours
    if name == "peft":
        from prefix_train.compare.peft import Peft

        return Peft
    from prefix_train.compare.block_streamer import BlockStreamer

    return BlockStreamer


def measure(name: str, case: Case, device: torch.device, gradients: Path) -> dict[str, Any]:
    """One program at one size. gradients: file for those of the first update.

    What runs out of memory is no error: `failed` says which allocation, and where in whose code.
    """
    found: dict[str, Any] = {
        "rival": name,
        "size": case.name,
        "case": asdict(case),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": versions(),
        "budget_gib": case.budget_gib,
        "budget_enforced": device.type == "cuda",
    }
    stage = "making it"
    try:
        driver = readings.Driver(device) if device.type == "cuda" else None
        limit(case, device, planner.CONTEXT)
        began = time.perf_counter()
        made = maker(name)(case, device)
        found |= {"made_s": time.perf_counter() - began, "notes": list(made.notes), "targets": int(case.positions // 2)}
        stage = "first update"
        found["first_s"] = seconds(made.update, device)
        save_file(kept(made), gradients)
        stage = "later updates"
        found |= updates(made, case, device)
        found["memory"] = memory(device, driver)
    except (torch.OutOfMemoryError, UserError, RuntimeError, ValueError) as error:
        found["failed"] = failure(error, stage)
    return found


def updates(made: Rival, case: Case, device: torch.device) -> dict[str, Any]:
    """Time and bytes of warm updates."""
    before = made.read_bytes()
    warm = [seconds(made.update, device) for _ in range(case.warm)]
    nbytes, median = (made.read_bytes() - before) // case.warm, statistics.median(warm)
    return {
        "warm_s": warm,
        "median_s": median,
        "positions": case.positions,
        "positions_per_s": case.positions / median,
        "read_bytes": nbytes,
        "read_gb_s": nbytes / median / 1e9,
    }


def kept(made: Rival) -> dict[str, torch.Tensor]:
    """Gradients in float32 on the CPU. Raises RuntimeError where a factor has none."""
    if missing := [name for name, parameter in made.parameters.items() if parameter.grad is None]:
        raise RuntimeError(f"{len(missing)} of {len(made.parameters)} adapter tensors have no gradient: {missing[0]}")
    return {
        name: parameter.grad.detach().float().cpu().contiguous()
        for name, parameter in made.parameters.items()
        if parameter.grad is not None
    }


def failure(error: BaseException, stage: str) -> dict[str, Any]:
    """What went wrong, when, and at which line: an allocation that failed has its size in the message."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames[-6:]]
    return {
        "out_of_memory": isinstance(error, torch.OutOfMemoryError),
        "during": stage,
        "message": str(error).split(" See documentation")[0][:600],
        "type": type(error).__name__,
        "where": where,
    }


def memory(device: torch.device, driver: readings.Driver | None) -> dict[str, Any]:
    """Peaks in GiB; on a CPU of the process, which holds mapped files too."""
    if driver is None:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return {"peak_gib": int(status.split("VmHWM:")[1].split()[0]) * 1024 / GIB, "peak_of": "process"}
    nbytes, where = driver.nbytes()
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return {
        "allocated_gib": allocated / GIB,
        "reserved_gib": reserved / GIB,
        "peak_gib": nbytes / GIB,
        "peak_of": f"driver, {where}",
        "retries": torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
    }


def versions() -> dict[str, str]:
    """Of what is there."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Measure what the command line names; the last line is the result."""
    told = json.loads(sys.argv[1])
    case = Case(**{**told["case"], "overrides": tuple(told["case"]["overrides"])})
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "8")))
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if told["rival"] == "ours":
        print(kernels.use_pins(dtype=case.config().model.dtype), file=sys.stderr, flush=True)
    found = measure(told["rival"], case, device, Path(told["gradients"]))
    print(json.dumps(found, allow_nan=False), flush=True)


if __name__ == "__main__":
    main()
