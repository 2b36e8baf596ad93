"""The same packs under our own FSDP2 and under Accelerate's, on two GPUs of one host: gradients, time, memory.

    python -m tests.bench.gpu_accelerate OUT.json [--layers 8] [--prefix 32000] [--continuations 40x1000]
    python -m tests.bench.gpu_accelerate OUT.json --tiny        the same code on two CPU processes over gloo

One pack for each GPU, LoRA without dropout. First the gate, in float32 at small sizes: gradients under each of the two
against one process with both packs. Then R29: dropout under `fsdp_activation_checkpointing`, refused, and what its
gradients would have been. Then updates of the reduced geometry in bfloat16. Each phase is told as it begins; OUT.json
is written anew after each. Exit status 0 where the gate held and everything was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import accelerate
import peft
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from configs.schema import Config
from prefix_train import bench_gate, dist, kernels, pack_forward
from prefix_train.bench_pack import Case, continuations
from prefix_train.dist import Ranks
from prefix_train.families import NotExact
from prefix_train.packs import PackInputs
from prefix_train.step import update
from tests import accelerated
from tests.bench.accelerate_sides import WORLD, Recompute, Theirs, Told, as_inputs, batches, own, wait
from tests.lives import free_port

TINY = Path(__file__).parents[1] / "data" / "tiny-geometry.yaml"
BOUND = 1e-4
"""Of a tensor's gradient in float32, relative; on GPUs products of different shapes add up in another order."""
GATE = (330, 16, 47)
"""Prefix, continuations and their tokens in the gate; with --tiny those of the measurement."""
GIB = 1 << 30


def small(config: Config, tiny: bool) -> Config:
    """The gate's model, in float32 and with plain torch where recurrence is."""
    build = {**config.model.build, **({} if tiny else bench_gate.SMALL)}
    model = dataclasses.replace(config.model, build=build, dtype="float32", deltanet="reference")
    memory = dataclasses.replace(config.memory, offload="none", keep_attention="none")
    return dataclasses.replace(config, model=model, memory=memory)


def gate(config: Config, shape: tuple[int, int, int], told: Told) -> bool:
    """Gradients of both packs on one process, against each of the two on all of them."""
    ranks, found = told.ranks, {}
    packs = batches(config, shape, torch.float32)
    with told.phase("gate: both packs on one process"):
        alone = own(config, Ranks(0, 1, ranks.device, None))
        update(alone, 1, 0.0, packs)
        truth = accelerated.gradients(alone.parameters.items())
    with told.phase("gate: our own FSDP2"):
        ours = own(config, ranks)
        update(ours, 1, 0.0, [packs[ranks.rank]])
        clipped = accelerated.gradients(ours.parameters.items())
        found["own"] = accelerated.worst(clipped, truth)
    with told.phase("gate: Accelerate's FSDP2"), ExitStack() as within:
        theirs = Theirs.of(config, ranks, within)
        theirs.backward(as_inputs(packs[ranks.rank]).to(ranks.device))
        theirs.accelerator.clip_grad_norm_(theirs.model.parameters(), theirs.clip_norm)
        found["accelerate"] = accelerated.worst(accelerated.gradients(theirs.model.named_parameters()), truth)
    passed = all(value <= BOUND for value in found.values())
    told.found["gate"] = {"passed": passed, "bound": BOUND, "gradients": found, "tensors": len(truth)}
    return passed


def replay(config: Config, shape: tuple[int, int, int], told: Told) -> None:
    """R29: dropout under Accelerate's recomputation. What is said, and how wrong the gradients would be; and that those
    under transformers' recomputation are right."""
    ranks = told.ranks
    pack = as_inputs(batches(config, shape, torch.float32)[ranks.rank]).to(ranks.device)
    kept: dict[Recompute, dict[str, Tensor]] = {}
    saved: dict[Recompute, dict[str, int]] = {}
    ways: tuple[Recompute, ...] = ("none", "accelerate", "transformers")
    said = ""
    for recompute in ways:
        with told.phase(f"R29: dropout, recomputation by {recompute}"), ExitStack() as within:
            theirs = Theirs.of(config, ranks, within, recompute, dropout=0.3)
            if recompute == "accelerate":
                said = refusal(theirs.model, pack)
                within.enter_context(unrefused())
            torch.manual_seed(ranks.rank)
            theirs.backward(pack)
            kept[recompute] = accelerated.gradients(theirs.model.named_parameters())
            saved[recompute] = saved_numbers(theirs)
    told.found["r29"] = {
        "refused": said,
        "error_without_refusal": accelerated.worst(kept["accelerate"], kept["none"]),
        "error_under_transformers": accelerated.worst(kept["transformers"], kept["none"]),
        "saved": saved,
    }


def saved_numbers(theirs: Theirs) -> dict[str, int]:
    """How many numbers of adapters are trained, and how many are in the file that docs/guides/accelerate.md writes, by
    names that a model without wrappers has: under others nothing is loaded."""
    state = accelerated.adapters(theirs.model)
    found = {"trained": sum(one.numel() for one in theirs.model.parameters() if one.requires_grad)}
    if theirs.accelerator.is_main_process:
        with tempfile.TemporaryDirectory() as folder:
            theirs.model.save_pretrained(folder, state_dict=state)
            written = load_file(Path(folder) / "adapter_model.safetensors")
        found["saved"] = sum(one.numel() for name, one in written.items() if accelerated.WRAPPER not in name)
    return found


def refusal(model: nn.Module, pack: PackInputs) -> str:
    """What a forward is refused with; empty where it is not."""
    try:
        model(**pack)
    except NotExact as error:
        return str(error)
    return ""


@contextmanager
def unrefused() -> Iterator[None]:
    """The product without its refusal."""
    refuse = pack_forward.refuse_other_masks
    pack_forward.refuse_other_masks = lambda model: None
    try:
        yield
    finally:
        pack_forward.refuse_other_masks = refuse


def measure(name: str, config: Config, shape: tuple[int, int, int], warm: int, told: Told) -> dict[str, Tensor]:
    """Seconds and memory of updates; the first one's gradients. name: `own`, or who recomputes under Accelerate."""
    ranks = told.ranks
    batch = batches(config, shape, torch.float32)[ranks.rank].to(ranks.device)
    empty(ranks.device)
    with ExitStack() as within:
        with told.phase(f"{name}: model, adapters, sharding"):
            if name == "own":
                stepper = own(config, ranks)
                parameters = stepper.parameters
                run: Callable[[], object] = lambda: update(stepper, 1, 1e-5, [batch])  # noqa: E731
            else:
                recompute: Recompute = "transformers" if name == "transformers" else "accelerate"
                theirs, pack = Theirs.of(config, ranks, within, recompute), as_inputs(batch)
                parameters = {key.replace(accelerated.WRAPPER, ""): one for key, one in theirs.model.named_parameters()}
                run = lambda: theirs.update(pack)  # noqa: E731
        weights = allocated(ranks.device)
        taken = first_gradients(parameters)
        with told.phase(f"{name}: first update"):
            run()
        seconds = []
        for number in range(warm):
            with told.phase(f"{name}: warm update {number + 1}"):
                began = time.perf_counter()
                run()
                wait(ranks)
                seconds.append(time.perf_counter() - began)
        told.found[name] = figures(seconds, batch.positions, weights, ranks)
    return taken


def first_gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Filled as the first backward has made them: this rank's shards, before any clip."""
    taken: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Any], None]:
        def kept(parameter: Any) -> None:
            gradient = parameter.grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            taken.setdefault(name, local.detach().double().cpu())

        return kept

    for name, parameter in parameters.items():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(keep(name))
    return taken


def figures(seconds: list[float], positions: int, weights: int, ranks: Ranks) -> dict[str, Any]:
    """Of one way: warm seconds, positions/s of one GPU, GPU memory of the rank that has most."""
    median = statistics.median(seconds)
    found: dict[str, Any] = {"seconds": seconds, "median_s": median, "positions_per_s": positions / median}
    if ranks.device.type == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(ranks.device), torch.cuda.max_memory_reserved(ranks.device)
        found |= {
            "weights_gib": ranks.max(weights) / GIB,
            "peak_allocated_gib": ranks.max(peak) / GIB,
            "peak_reserved_gib": ranks.max(reserved) / GIB,
        }
    return found


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def empty(device: torch.device) -> None:
    """Let the model before go, and forget its peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def work(given: argparse.Namespace) -> int:
    """One rank."""
    with dist.joined(240.0) as ranks:
        told = Told(given.out, ranks)
        told.found["machine"] = {
            "device": torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu",
            **{each.__name__: each.__version__ for each in (torch, transformers, peft, accelerate)},
        }
        count, length = continuations(given.continuations)
        shape = (given.prefix, count, length)
        geometry = str(TINY) if given.tiny else "qwen3.6-27b"
        case = Case(geometry, *shape, layers=given.layers, overrides=("adapter.dropout=0", *given.options))
        config = case.config()
        told.found["case"] = {"geometry": geometry, "layers": given.layers, "shape": shape, "options": given.options}
        gated = small(config, given.tiny), shape if given.tiny else GATE
        if not gate(*gated, told):
            return 1
        empty(ranks.device)
        replay(*gated, told)
        if ranks.device.type == "cuda":
            with told.phase("kernels: pins, compiling ahead"):
                told.found["pins"] = kernels.use_pins(dtype=config.model.dtype)
                kernels.compile_ahead(config, ranks.device)
        taken = [measure(name, config, shape, given.warm, told) for name in ("own", "accelerate")]
        ours, theirs = told.found["own"], told.found["accelerate"]
        told.found["accelerate_over_own"] = {
            key: theirs[key] / ours[key] for key in ours if key.endswith(("_s", "gib"))
        }
        told.found["bfloat16_gradients_rank_0"] = compared(*taken)
        measure("transformers", config, shape, given.warm, told)
        with told.phase("done"):
            pass
    return 0


def compared(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Of this rank's shards after the first update: relative difference of all together, in bfloat16's own noise."""
    assert ours.keys() == theirs.keys()
    difference = sum(float((theirs[name] - each).square().sum()) for name, each in ours.items()) ** 0.5
    return {"difference": difference / sum(float(each.square().sum()) for each in ours.values()) ** 0.5}


def launch(words: list[str], tiny: bool) -> int:
    """Both ranks; the largest of their exit statuses. A rank that fails ends the other one."""
    place = {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment = {**os.environ, **place, **({"CUDA_VISIBLE_DEVICES": ""} if tiny else {})}
    program = [sys.executable, "-W", "ignore", "-m", "tests.bench.gpu_accelerate", *words]
    running = [
        subprocess.Popen(program, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(WORLD)
    ]
    while all(process.poll() is None for process in running):
        time.sleep(0.2)
    if any(process.poll() for process in running):
        for process in running:
            process.terminate()
    return max(abs(process.wait()) for process in running)


def main() -> int:
    """Both ranks, or the one that the environment names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prefix", type=int)
    parser.add_argument("--continuations")
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--options", nargs="*", default=[], help="of the configuration, as in memory.offload=auto")
    given = parser.parse_args()
    defaults = {"layers": 4, "prefix": 60, "continuations": "3x11"} if given.tiny else {
        "layers": 8, "prefix": 32000, "continuations": "40x1000"}  # fmt: skip
    for name, value in defaults.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    if "RANK" in os.environ:
        return work(given)
    return launch(sys.argv[1:], given.tiny)


if __name__ == "__main__":
    sys.exit(main())
