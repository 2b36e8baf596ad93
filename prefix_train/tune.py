"""`prefix-train tune`: let every kernel of the job search once, record the winners, prove them in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from configs import kernel_pins, runfolder
from configs.errors import UserError
from configs.schema import Config
from prefix_train import compiling, kernels, trial

FIELDS = ("num_warps", "num_stages", "num_ctas")


def tune(config: Config, out: Path | None = None) -> dict[str, Any]:
    """Search with free memory and write the pins of this GPU's model to `out`, by default configs/fla/<GPU>.

    What searches: an update of the model's distinct layers over a shortened pack, then Gated DeltaNet's kernels in a
    middle and the longest length bucket of the job's packs.

    Must run in a process that has not imported `fla`. UserError without CUDA, or where the job's kernels do not search.
    """
    if not torch.cuda.is_available():
        raise UserError("kernels are tuned on the GPU that will run them: there is no CUDA device here")
    if "fla" in sys.modules:
        raise RuntimeError("fla was imported before its pins could be switched off")
    for name in ("FLA_CACHE_MODE", "FLA_CONFIG_DIR"):
        os.environ.pop(name, None)
    device = torch.device("cuda", 0)
    geometry = kernels.searching_kernels(config, device)
    if geometry is None:
        raise UserError("no layer of this model runs kernels that search: there is nothing to tune")
    gpu = torch.cuda.get_device_name(device)
    made = {**kernels.versions(), "dtype": config.model.dtype, "gpu": gpu, "date": time.strftime("%Y-%m-%d")}
    reach = kernels.buckets(geometry, config.pack.max_positions)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as cache, compiling.candidates_side_by_side(), kernels.watched() as launches:
        os.environ["TRITON_CACHE_DIR"] = cache  # what lies in another folder may be the result of another search
        trial.whole_update(config, reach[0], device)
        for tokens in sorted({reach[len(reach) // 2], reach[-1]} - {reach[0]}):
            trial.delta_net(config, geometry, tokens, device)
        torch.cuda.synchronize(device)
    searched = {name: autotuner for name, autotuner in launches.autotuners.items() if launches.searches[name]}
    pins = out or kernel_pins.folder(gpu)
    write(pins, searched, made)
    return {"folder": str(pins), **made, "kernels": sorted(searched), "searches": sum(launches.searches.values()),
            "seconds": round(time.monotonic() - began, 1)}  # fmt: skip


def write(pins: Path, searched: dict[str, Any], made: dict[str, str]) -> None:
    """The winners of all searches as one folder of pins; pins of other kernels in it are removed."""
    pins.mkdir(parents=True, exist_ok=True)
    for path in pins.glob("*.json"):
        path.unlink()
    for kernel, autotuner in searched.items():
        winners = {json.dumps(list(map(str, key))): describe(config) for key, config in autotuner.cache.items()}
        searches = [{"key": json.loads(key), **config} for key, config in winners.items()]
        document = kernel_pins.document(kernel, most_often(list(winners.values())), made, searches)
        runfolder.write_json(pins / f"{kernel}.json", document)
    listed = {name: kernel_pins.entry(pins, name, kernels.kind_of(searched[name])) for name in sorted(searched)}
    runfolder.write_json(pins / kernel_pins.LIST, {**made, "kernels": listed})


def describe(config: Any) -> dict[str, Any]:
    """A Triton configuration as FLA reads it."""
    return {"kwargs": dict(config.kwargs), **{name: int(getattr(config, name)) for name in FIELDS}}


def most_often(configs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The winner of most searches; of equals the last, which is that of the longest buffer."""
    counts = Counter(json.dumps(config, sort_keys=True) for config in configs)
    best = max(counts.values())
    return next(config for config in reversed(configs) if counts[json.dumps(config, sort_keys=True)] == best)


def prove(where: Path, overrides: Sequence[str], pins: Path) -> dict[str, Any]:
    """The proof in a process of its own, with an empty Triton cache."""
    program = [sys.executable, "-m", "prefix_train.cli", "kernels", str(where), *overrides, "--prove", "--json"]
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache, "FLA_CONFIG_DIR": str(pins)}
        ran = subprocess.run(program, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if not ran.stdout.strip():
        raise RuntimeError(f"the proof ended with status {ran.returncode} and no answer")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found
