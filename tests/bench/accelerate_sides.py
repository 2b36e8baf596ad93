"""The two that `gpu_accelerate` holds side by side: a model under our own FSDP2, and the same under Accelerate's."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from configs import runfolder
from configs.schema import Config
from prefix_train import anatomy, bench_gate, gradients, offload, pack_forward, shard
from prefix_train import model as models
from prefix_train.bench import random_examples, star
from prefix_train.collate import Batch, collate, entry_weights
from prefix_train.dist import Ranks
from prefix_train.packs import PackInputs, PackTargets
from prefix_train.step import Stepper
from tests import accelerated

WORLD = 2
Recompute = Literal["none", "accelerate", "transformers"]
"""Who recomputes layers: nobody, Accelerate (`fsdp_activation_checkpointing`), or transformers' own switch."""


@dataclass
class Told:
    """What one rank has found so far. Rank 0 says what happens and writes it down."""

    out: Path
    ranks: Ranks
    found: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within it `name` is done, on all ranks."""
        if self.ranks.rank == 0:
            print(f"{name} ...", end="", file=sys.stderr, flush=True)
        began = time.perf_counter()
        yield
        wait(self.ranks)
        self.found.setdefault("phases_s", {})[name] = round(time.perf_counter() - began, 2)
        if self.ranks.rank == 0:
            print(f" {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
            runfolder.write_json(self.out, self.found)


def wait(ranks: Ranks) -> None:
    """Until every rank, and its device, has come here."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
    ranks.barrier()


def batches(config: Config, shape: tuple[int, int, int], dtype: torch.dtype) -> list[Batch]:
    """A pack for each rank, with examples of its own, weighted over both."""
    prefix, count, length = shape
    vocabulary = config.model.build["vocab_size"]
    examples = [random_examples(prefix, count, length, vocabulary, config.seed + rank) for rank in range(WORLD)]
    weights = entry_weights("example", [int(one.target.sum()) for each in examples for one in each])
    return [collate(star(each, prefix), each, weights, dtype) for each in examples]


def as_inputs(batch: Batch) -> PackInputs:
    """The same pack for a model under `train_packs`, whose ranks' losses are averaged."""
    targets = PackTargets(batch.targets.rows, batch.targets.ids, batch.targets.weights * WORLD)
    return PackInputs(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        layout=batch.layout,
        targets=targets,
        use_cache=False,
    )


def adapted(config: Config, device: torch.device) -> nn.Module:
    """The geometry with adapters that are not zero, the same on every rank."""
    base = bench_gate.build_on(device, dict(config.model.build), models.DTYPES[config.model.dtype])
    model = models.adapt(base, config)
    bench_gate.draw_adapters(model)
    return model


def own(config: Config, ranks: Ranks) -> Stepper:
    """Ready for updates under this package's sharding; on one rank under none."""
    model = adapted(config, ranks.device)
    models.make_ready(model, config)
    root = models.Root(model.train(), models.DTYPES[config.model.dtype], config.train.loss_chunk_rows, images=False)
    if ranks.mesh is None:
        root.to(ranks.device)
    else:
        shard.shard(root, ranks.mesh)
    offload.attach(root, config, ranks.device)
    parameters = anatomy.trainable(model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-5)
    coverage = gradients.Coverage(list(parameters), frozenset(), warmup=9)
    return Stepper(root, parameters, optimizer, ranks, coverage, config.seed, config.train.clip_norm)


@dataclass
class Theirs:
    """The same model under Accelerate's FSDP2."""

    accelerator: Any
    model: Any
    optimizer: Any
    clip_norm: float

    @classmethod
    def of(
        cls, config: Config, ranks: Ranks, within: ExitStack, recompute: Recompute = "accelerate", dropout: float = 0.0
    ) -> Theirs:
        """within: the model takes packs until it is closed. dropout: of every adapter, PEFT's own."""
        model: Any = adapted(config, ranks.device)
        for module in model.modules():
            if dropout and hasattr(module, "lora_dropout"):
                module.lora_dropout["default"] = nn.Dropout(dropout)
        model.train().enable_input_require_grads()
        if recompute == "transformers":
            model.get_base_model().activation_checkpointing_enable()
        within.enter_context(pack_forward.train_packs(model, config.model.attention, config.model.deltanet))
        return cls(*accelerated.sharded(model, recompute == "accelerate", ranks.device), config.train.clip_norm)

    def backward(self, pack: PackInputs) -> Tensor:
        """This rank's loss, its gradients in place."""
        loss: Tensor = self.model(**pack).loss
        self.accelerator.backward(loss)
        return loss.detach()

    def update(self, pack: PackInputs) -> None:
        """One whole update."""
        self.backward(pack)
        self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
