"""The gate of the pack bench: packs against transformers' own unpatched model over the same examples.

In float32, and, 64 examples, in bfloat16, at the geometry's own head sizes. No figure without it.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch

from configs.schema import Config, ModelConfig
from prefix_train import anatomy, outcome, tiny, verify
from prefix_train import model as models
from prefix_train.bench import random_examples, star

SMALL = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096}
"""What the gate's model has instead of the geometry's sizes; heads keep theirs."""
SHAPES = {"float32": (330, 64, 47), "bfloat16": (330, 64, 1001)}
"""Prefix, continuations and their tokens in the gate, no multiple of a kernel's block. In bfloat16 each token's loss is
off by about 1%: only over many targets are means comparable to 0.0002."""

TORCH_FUNCTIONS = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
"""What transformers' models call by these names, and replace by faster kernels where those are installed."""


def gate(
    config: Config,
    device: torch.device,
    phase: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> dict[str, Any]:
    """Packs against transformers' own model, one example at a time, at the geometry's head sizes.

    In float32 both sides run plain torch where recurrence is: flash-linear-attention's kernels multiply in TF32.
    phase: around each of the two.
    """
    parts: dict[str, Any] = {}
    names: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    for name in names:
        with phase(f"packs against transformers' own model in {name}"):
            parts[name] = agreement(config, name, device)
    return {"passed": all(part["passed"] for part in parts.values()), **parts}


def agreement(config: Config, dtype: Literal["float32", "bfloat16"], device: torch.device) -> dict[str, Any]:
    """One of the gate's two comparisons."""
    build = {**config.model.build, **SMALL}
    adapter = dataclasses.replace(config.adapter, dropout=0.0)
    model_config = dataclasses.replace(config.model, build=build, dtype=dtype)
    model_config = in_float32(model_config, device) if dtype == "float32" else model_config
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


def in_float32(model: ModelConfig, device: torch.device) -> ModelConfig:
    """`model` in float32, with kernels in the place of those that take 16 bits alone."""
    attention = model.attention
    if device.type == "cuda" and attention in ("merged", "joined"):
        attention = "auto"
    return dataclasses.replace(model, dtype="float32", deltanet="reference", attention=attention)


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
