"""The gate of the streaming bench: gradients of a model whose blocks pass through, against the same model resident.

On this device, at the geometry's own head sizes, with its kernels. No figure without it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.schema import Config
from prefix_train import anatomy, gradients
from prefix_train import model as models
from prefix_train.bench import random_examples, star
from prefix_train.bench_gate import SMALL, build_on, draw_adapters
from prefix_train.collate import Batch, collate, entry_weights
from prefix_train.dist import Ranks
from prefix_train.packing import standalone
from prefix_train.step import Stepper, update
from prefix_train.stream import build
from prefix_train.stream.engine import Streamed, fill, prepare
from prefix_train.stream.places import Choice
from prefix_train.stream.store import Store

SHAPE = 330, 8, 47
"""Prefix, continuations and their tokens of the gate's pack, no multiple of a kernel's block."""

ALONE = 2
"""Examples that go through it alone as well, in the same visit as the pack."""

WORDS = 1024
"""Of a tile of the head, which so passes by in several."""

RESIDENT, SLOTS = 1, 2
"""Blocks that stay and blocks that pass at a time: fewer than there are, so that slots are used again."""


def gate(
    config: Config,
    device: torch.device,
    folder: Path,
    phase: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> dict[str, Any]:
    """One update's gradients by both engines, with the same adapters and packs, from a small store in `folder`.

    Passed where they differ by no more than the resident model's own differ from run to run (twice that, for there
    are few runs): to the bit, where it adds up in a fixed order.
    """
    small, base, store = _small(config, folder)
    with phase("a resident model and one that streams"):
        whole, stream = _resident(base, small, device), _streamed(base, store, small, device)
        packs = _packs(small)
    with phase("updates by both"):
        truth, *others = (gradient_of(whole, packs) for _ in range(3))
        found = [gradient_of(stream, packs) for _ in range(2)]
    noise = max(difference(truth, other) for other in others)
    worst = max(difference(truth, mine) for mine in found)
    equal = sum(torch.equal(truth[name], found[-1][name]) for name in truth)
    zero = [name for name, tensor in truth.items() if not tensor.count_nonzero()]
    assert isinstance(stream.root, Streamed)
    stream.root.source.close()
    passed = worst <= 2 * noise and not zero and all(found_.keys() == truth.keys() for found_ in found)
    return {
        "passed": passed,
        "tensors": len(truth),
        "equal": equal,
        "gradient": worst,
        "resident_noise": noise,
        "zero": zero,
    }


def _small(config: Config, folder: Path) -> tuple[Config, Any, Store]:
    """The geometry made small, its model on the CPU with the weights that its store gives back, and the store."""
    sizes = {**config.model.build, **SMALL}
    small = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, build=sizes),
        adapter=dataclasses.replace(config.adapter, dropout=0.0),
        train=dataclasses.replace(config.train, loss_chunk_words=WORDS),
        stream=dataclasses.replace(config.stream, slots=SLOTS, packs_per_visit=1 + ALONE, store=str(folder)),
        pack=dataclasses.replace(config.pack, max_positions=SHAPE[0] + SHAPE[1] * SHAPE[2]),
    )
    dtype = models.DTYPES[config.model.dtype]
    base = build_on(torch.device("cpu"), sizes, dtype)
    store = build.from_model(base, folder, Choice("nf4", dtype))
    with torch.no_grad():
        for block in store.blocks:
            for name, tensor in store.tensors(block):
                base.get_parameter(name).copy_(tensor)
    return small, base, store


def _resident(base: Any, config: Config, device: torch.device) -> Stepper:
    model = models.prepare(copy.deepcopy(base).to(device), config)
    train = config.train
    root = models.Root(
        model, models.DTYPES[config.model.dtype], train.loss_chunk_rows, False, train.loss_chunk_words
    ).to(device)
    return _stepper(root, config, device)


def _streamed(base: Any, store: Store, config: Config, device: torch.device) -> Stepper:
    skeleton = models.skeleton(config.model, buffers=True)
    fill(skeleton, store)
    root = Streamed(prepare(skeleton, config), config, store, device, False, RESIDENT)
    return _stepper(root, config, device)


def _stepper(root: models.Root, config: Config, device: torch.device) -> Stepper:
    draw_adapters(root.model)
    parameters = anatomy.trainable(root.model)
    coverage = gradients.Coverage(list(parameters), frozenset(), config.train.warmup_updates)
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.0, weight_decay=0.0)
    return Stepper(root, parameters, optimizer, Ranks(0, 1, device, None), coverage, config.seed, 0.0)


def _packs(config: Config) -> list[Batch]:
    prefix, count, length = SHAPE
    vocabulary = int(config.model.build.get("vocab_size", SMALL["vocab_size"]))
    examples = random_examples(prefix, count, length, vocabulary, config.seed)
    weights = entry_weights("example", [int(example.target.sum()) for example in examples])
    packs = [star(examples, prefix), *(standalone(index, len(examples[index].ids)) for index in range(ALONE))]
    return [collate(pack, examples, weights) for pack in packs]


def gradient_of(stepper: Stepper, packs: list[Batch]) -> dict[str, Tensor]:
    """What one update leaves in every trained tensor, by name."""
    update(stepper, 1, 0.0, packs)
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in stepper.parameters.items()
        if parameter.grad is not None
    }


def difference(truth: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The worst tensor's relative difference; infinite where one is not there."""
    if truth.keys() != other.keys():
        return float("inf")
    found = 0.0
    for name, tensor in truth.items():
        away = (other[name].double() - tensor.double()).norm()
        found = max(found, float(away / tensor.double().norm().clamp_min(1e-30)))
    return found
