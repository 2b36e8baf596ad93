"""Packed against standalone on this machine's CPU: same examples, same kernels, one run, the correctness gate first.

Both sides run the whole update: forward, recomputation, backward, clip, AdamW. A figure is only reported when losses
and gradients of the two sides agree in the same run. Peak memory is read in a process of its own per shape.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs import compose
from configs.schema import Config, ModelConfig
from prefix_train import anatomy, gradients, verify
from prefix_train import model as models
from prefix_train.budget import visible_pairs
from prefix_train.collate import Batch, collate, entry_weights
from prefix_train.dist import Ranks
from prefix_train.packing import Pack, standalone
from prefix_train.render import Example
from prefix_train.step import Stepper, update

GATE = verify.Bounds(mean_loss=1e-5, example_mean=1e-5, example_max=1e-4, gradient=1e-4)


def random_examples(prefix: int, continuations: int, length: int, vocabulary: int, seed: int) -> list[Example]:
    """Text examples that share `prefix` random tokens and go on for `length`; the later half of these are targets."""
    draw = np.random.default_rng(seed)
    shared = draw.integers(0, vocabulary, prefix)
    examples = []
    for index in range(continuations):
        ids = np.concatenate([shared, draw.integers(0, vocabulary, length)]).astype(np.int64)
        ids[prefix] = index % vocabulary
        target = np.arange(len(ids)) >= len(ids) - max(1, length // 2)
        position_ids = np.arange(len(ids))[None]
        prompt_length = int(np.argmax(target))
        examples.append(Example(str(index), f"random:{index}", ids, ids, position_ids, target, (), "", prompt_length))
    return examples


def star(examples: Sequence[Example], prefix: int) -> Pack:
    """One pack: the prefix of all examples, and each one's continuation."""
    lengths = (prefix, *(len(example.ids) - prefix for example in examples))
    parents = (-1, *(0 for _ in examples))
    origin = ((0, 0), *((index, prefix) for index in range(len(examples))))
    paths = tuple((0, index + 1) for index in range(len(examples)))
    logical = sum(len(example.ids) for example in examples)
    pairs = visible_pairs(lengths, parents)
    return Pack(lengths, parents, origin, tuple(range(len(examples))), paths, sum(lengths), logical, pairs)


class Bench:
    """The demonstration's model, ready to train, and the two ways to run the same examples."""

    def __init__(self, config: Config, prefix: int, continuations: int, length: int) -> None:
        torch.set_num_threads(config.train.threads)
        model, _ = models.load(text_only(config.model))
        prepared = models.prepare(model, config)
        self.root = models.Root(prepared, models.DTYPES[config.model.dtype], config.train.loss_chunk_rows, images=False)
        vocabulary = anatomy.find(prepared).head.out_features
        self.examples = random_examples(prefix, continuations, length, vocabulary, config.seed)
        weights = entry_weights("example", [int(example.target.sum()) for example in self.examples])
        self.pack = star(self.examples, prefix)
        self.alone = [standalone(index, len(example.ids)) for index, example in enumerate(self.examples)]
        self.batches: dict[str, list[Batch]] = {
            "packed": [collate(self.pack, self.examples, weights)],
            "standalone": [collate(pack, self.examples, weights) for pack in self.alone],
        }
        parameters = anatomy.trainable(prepared)
        optimizer = torch.optim.AdamW(parameters.values(), lr=1e-5)
        coverage = gradients.Coverage(list(parameters), frozenset(), config.train.warmup_updates)
        alone = Ranks(0, 1, torch.device("cpu"), None)
        self.stepper = Stepper(self.root, parameters, optimizer, alone, coverage, config.seed, config.train.clip_norm)

    def gate(self) -> dict[str, Any]:
        """Packed against standalone through the same kernels: losses and every gradient."""
        return verify.compare(
            verify.packed(self.root, [self.pack], self.examples),
            verify.packed(self.root, self.alone, self.examples),
            GATE,
        )

    def run(self, side: str) -> None:
        """One whole update."""
        update(self.stepper, 0, 1e-5, self.batches[side])


def timed(run: Callable[[], None], repeats: int) -> dict[str, Any]:
    """Seconds of the first run and of `repeats` more."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    warm = seconds[1:]
    return {"first_s": seconds[0], "median_s": statistics.median(warm), "min_s": min(warm), "max_s": max(warm)}


def cpu(
    config: Config, prefix: int = 2048, continuations: int = 32, length: int = 32, repeats: int = 5
) -> dict[str, Any]:
    """Time and memory of a pack against its examples alone. Raises RuntimeError where the gate does not hold."""
    bench = Bench(config, prefix, continuations, length)
    gate = bench.gate()
    if not gate["passed"]:
        raise RuntimeError(f"no figure without the correctness gate: {json.dumps(gate)}")
    sides = {side: timed(lambda side=side: bench.run(side), repeats) for side in ("packed", "standalone")}  # type: ignore[misc]
    shape = {"prefix": prefix, "continuations": continuations, "continuation_tokens": length}
    peaks = {
        str(count): update_memory(config, shape | {"continuations": count})
        for count in (continuations, 4 * continuations)
    }
    return {
        "machine": {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "torch": torch.__version__,
        "shape": shape,
        "gate": gate,
        "positions": bench.pack.positions,
        "logical_tokens": bench.pack.logical,
        **sides,
        "ratio": sides["standalone"]["median_s"] / sides["packed"]["median_s"],
        "update_bytes": peaks,
        "update_bytes_growth": peaks[str(4 * continuations)] / peaks[str(continuations)],
    }


def text(found: dict[str, Any]) -> str:
    """The figures for a person."""
    shape, packed, alone = found["shape"], found["packed"], found["standalone"]
    mib = {count: size / (1 << 20) for count, size in found["update_bytes"].items()}
    return "\n".join(
        (
            f"{shape['prefix']} + {shape['continuations']} x {shape['continuation_tokens']} tokens: "
            f"{found['positions']:,} positions for {found['logical_tokens']:,} logical tokens",
            f"gate: losses and {found['gate']['tensors']} gradients agree, worst relative difference "
            f"{found['gate']['differences']['gradient']:.1e}",
            f"update of the pack {packed['median_s']:.2f} s ({packed['min_s']:.2f} to {packed['max_s']:.2f}), "
            f"of the examples alone {alone['median_s']:.2f} s ({alone['min_s']:.2f} to {alone['max_s']:.2f})",
            f"ratio {found['ratio']:.1f}",
            "memory that an update adds: " + ", ".join(f"{size:.0f} MiB at {n}" for n, size in mib.items()),
        )
    )


def text_only(model: ModelConfig) -> ModelConfig:
    """The language model of a vision-language `build`, by itself."""
    if "text_config" not in model.build:
        return model
    return dataclasses.replace(model, build={**model.build["text_config"], "model_type": "qwen3_5_text"})


def update_memory(config: Config, shape: dict[str, int]) -> int:
    """Bytes by which one packed update raises the peak of a fresh process's resident memory."""
    program = [sys.executable, "-m", "prefix_train.bench", json.dumps(shape)]
    ran = subprocess.run(program, input=compose.to_yaml(config), capture_output=True, text=True, check=True)
    return int(ran.stdout.splitlines()[-1])


def _measure_memory() -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(sys.stdin.read())
        file.flush()
        bench = Bench(compose.load(Path(file.name)), **_shape(json.loads(sys.argv[1])))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is resident now
    before = _resident_bytes("VmRSS")
    bench.run("packed")
    print(_resident_bytes("VmHWM") - before)


def _resident_bytes(field: str) -> int:
    """VmRSS, now, or VmHWM, its peak, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def _shape(shape: dict[str, int]) -> dict[str, int]:
    return {"prefix": shape["prefix"], "continuations": shape["continuations"], "length": shape["continuation_tokens"]}


if __name__ == "__main__":
    _measure_memory()
