"""The streaming engine itself, as a run has it."""

from __future__ import annotations

from dataclasses import replace

import torch

from prefix_train import anatomy, engines, gradients
from prefix_train.budget import GIB, Shape
from prefix_train.collate import collate, entry_weights
from prefix_train.compare.case import Case, draw, factors
from prefix_train.dist import Ranks
from prefix_train.packing import standalone
from prefix_train.step import Stepper, update
from prefix_train.stream import planner
from prefix_train.stream.engine import Streamed


class Ours:
    """See `case.Rival`."""

    def __init__(self, case: Case, device: torch.device) -> None:
        config, ranks, example = case.config(), Ranks(0, 1, device, None), case.example()
        pack = standalone(0, len(example.ids))
        self.batch = collate(pack, [example], entry_weights("example", [int(example.target.sum())]))
        config = replace(config, pack=replace(config.pack, max_positions=pack.positions))
        model = engines.prepare(engines.load(config)[0], config, device)
        shape = Shape.of(pack.lengths, pack.parents, len(self.batch.targets.rows))
        root, _ = engines.make_root(model, config, ranks, False, shape)
        assert isinstance(root, Streamed)
        self.root, named = root, anatomy.trainable(model)
        self.parameters = factors(named)
        draw(self.parameters)
        optimizer = torch.optim.AdamW(named.values(), lr=1e-5)
        coverage = gradients.Coverage(list(named), frozenset(), config.train.warmup_updates)
        self.stepper = Stepper(root, named, optimizer, ranks, coverage, config.seed, clip_norm=0.0)  # as the others
        plan = planner.make(config, shape)
        self.notes = (f"{plan.resident} of {len(root.ring.units)} blocks stay", f"planned {plan.needed / GIB:.2f} GiB")

    def update(self) -> None:
        """One update."""
        update(self.stepper, 1, 1e-5, [self.batch])

    def read_bytes(self) -> int:
        """Of blocks and head."""
        return self.root.ring.figures.nbytes + self.root.head.ring.figures.nbytes
