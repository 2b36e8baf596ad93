"""The held-out examples of a run, and their loss through packs on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from configs.schema import Config
from prefix_train import evaluate, shard
from prefix_train.dist import Ranks
from prefix_train.feed import load_agreed
from prefix_train.model import Root
from prefix_train.packing import Pack
from prefix_train.plan import Plan, plan_heldout
from prefix_train.render import Example, Renderer
from prefix_train.tree import build_forest


@dataclass(frozen=True)
class Heldout:
    """examples: the first `evaluate.examples` of the file. plan: all of them in one round. skipped: bad rows."""

    examples: Sequence[Example]
    plan: Plan
    images: bool
    skipped: list[str]

    @classmethod
    def load(cls, config: Config, renderer: Renderer, ranks: Ranks) -> Heldout | None:
        """The held-out examples of `config`; none without `data.heldout`. The same on every rank, or an error."""
        if config.data.heldout is None:
            return None
        found = load_agreed(Path(config.data.heldout), renderer, config, ranks)
        examples = found[: config.evaluate.examples]
        forest = build_forest((example.keys for example in examples), config.pack.min_shared)
        sources = [example.source for example in examples]
        plan = plan_heldout(config, forest, ranks.world, sources)
        ranks.require_same("the plan of the held-out examples", plan.digest)
        return cls(examples, plan, any(example.images for example in examples), found.skipped)

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
