"""The held-out examples of a run: their loss through packs and the answers to their prompts, on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from configs.schema import Config
from prefix_train import evaluate, metrics, shard
from prefix_train.dist import Ranks
from prefix_train.evaluate import Scored
from prefix_train.feed import load_agreed
from prefix_train.metrics import Metric
from prefix_train.model import Root
from prefix_train.packing import Pack
from prefix_train.plan import Plan, plan_heldout
from prefix_train.render import Example, Renderer
from prefix_train.tree import build_forest


@dataclass(frozen=True)
class Heldout:
    """examples: the first `evaluate.examples` of the file. plan: all of them in one round. skipped: bad rows.

    path: of the file. order: the examples' indices as they stand in the tree of their beginnings. targets: texts.
    """

    examples: Sequence[Example]
    plan: Plan
    images: bool
    skipped: list[str]
    path: Path
    order: list[int]
    targets: list[str]

    @classmethod
    def load(cls, config: Config, renderer: Renderer, ranks: Ranks) -> Heldout | None:
        """The held-out examples of `config`; none without `data.heldout`. The same on every rank, or an error."""
        if config.data.heldout is None:
            return None
        path = Path(config.data.heldout)
        found = load_agreed(path, renderer, config, ranks)
        examples = found[: config.evaluate.examples]
        forest = build_forest((example.keys for example in examples), config.pack.min_shared)
        seen = [(example.source, example.answer, bool(example.images)) for example in examples]
        plan = plan_heldout(config, forest, ranks.world, [source for source, *_ in seen])
        ranks.require_same("the plan of the held-out examples", plan.digest)
        order = np.argsort(forest.last, kind="stable").tolist()
        images = any(images for *_, images in seen)
        return cls(examples, plan, images, found.skipped, path, order, [answer for _, answer, _ in seen])

    def packs(self, rank: int) -> tuple[Pack, ...]:
        """What `rank` computes; as many packs for every rank."""
        return self.plan.updates[0][rank]

    def losses(self, root: Root, ranks: Ranks) -> dict[int, float]:
        """Loss of every example by its index, on every rank; dropout is off.

        Raises UserError, on every rank, for an example that one of them cannot read any more.
        """
        root.eval()
        try:
            mine = evaluate.losses(root, self.packs(ranks.rank), self.examples, ranks)
        finally:
            root.train()
            shard.release(root)
        return {index: loss for part in ranks.gather(list(mine.items())) for index, loss in part}

    def metrics(self, folder: Path, config: Config, ranks: Ranks) -> list[Metric]:
        """The metrics of `config`, users' from their copies in `folder`, tried out; none where nothing is generated.

        Raises UserError, on every rank, for one that cannot be used.
        """
        if not config.evaluate.generate:
            return []

        def load() -> list[Metric]:
            found = metrics.load(folder, config.evaluate.metrics)
            metrics.check_targets(found, self.targets, str(self.path))
            evaluate.try_out(found, self.examples[0], self.path)
            return found

        return ranks.together(load)

    def answers(
        self, model: PreTrainedModel, tokenizer: Any, config: Config, found: Sequence[Metric], ranks: Ranks
    ) -> Scored:
        """Answers of the unpatched `model` to all prompts, each by one rank, and their scores; the same on every rank.

        Every rank calls it, with a whole model of its own. Raises UserError, on every rank, for an example that one of
        them cannot read any more.
        """
        mine = evaluate.shares(self.order, ranks.world)[ranks.rank]
        examples = [self.examples[index] for index in mine]
        answered, counts = ranks.together(
            lambda: evaluate.answers(model, tokenizer, examples, config.evaluate, config.pack.min_shared)
        )
        return evaluate.score(list(zip(mine, answered, strict=True)), counts, found, self.path, ranks)
