"""From data and plan to batches: what is printed before a run is what runs, and packs that lose examples stay below
the cap."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from configs.errors import UserError
from configs.schema import Config, ModelConfig, PackConfig, SlurmConfig, TrainConfig
from prefix_train import feed as feeds
from prefix_train import heldout, lengths, outcome
from prefix_train.budget import Cost
from prefix_train.dist import Ranks
from prefix_train.feed import Feed
from prefix_train.packing import Packer
from prefix_train.plan import plan_heldout, plan_run, plan_training
from prefix_train.tree import build_forest

TINY = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 64}


@dataclass
class Row:
    """What a feed reads of an example before it makes batches."""

    source: str
    keys: np.ndarray
    target: np.ndarray
    images: tuple[()] = ()


def rows(shapes: list[tuple[int, int]]) -> list[Row]:
    """Examples of (shared, own) tokens: the same first ones for all with as many shared, then their own."""
    made = []
    for index, (shared, own) in enumerate(shapes):
        keys = np.r_[np.full(shared, 1000 + shared), np.full(own, index)]
        made.append(Row(f"train.jsonl:{index + 1}", keys, np.arange(len(keys)) >= shared))
    return made


def config(ranks: int = 1, **pack: int) -> Config:
    return Config(
        cluster="local",
        model=ModelConfig(build=TINY),
        pack=PackConfig(**pack),
        train=TrainConfig(updates=2),
        slurm=SlurmConfig(tasks_per_node=ranks),
    )


def ranks(world: int = 1) -> Ranks:
    return Ranks(0, world, torch.device("cpu"), None)


def largest_left() -> int:
    """Positions of the larger of two packs: one whole, or the same without the example that ends first."""
    feed = Feed(config(max_positions=71, examples_per_update=3), rows([(10, 30), (10, 30), (10, 1)]), ranks())
    (whole,) = feed.plan.epoch(0).updates[0][0]
    assert whole.positions == 71
    ((left,),) = feed.without(((whole,),), {2})
    assert sorted(left.members) == [0, 1]
    assert left.logical == 80
    return left.positions


def test_a_pack_without_its_bad_examples_is_not_larger() -> None:
    assert largest_left() == 70


def test_a_pack_without_its_bad_examples_would_exceed_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the beginning that two examples still share saves less than `min_shared`, and each gets its own."""
    monkeypatch.setattr(feeds, "Packer", lambda forest, min_shared: Packer(forest, 16))
    assert largest_left() == 80


def test_whatever_is_bad_packs_shrink() -> None:
    shapes = [(10, 30), (10, 30), (10, 1), (5, 7), (5, 2), (5, 9), (5, 1), (0, 12)]
    feed = Feed(config(max_positions=75, packs_per_update=2), rows(shapes), ranks())
    for update in feed.plan.epoch(0).updates:
        for bad in itertools.chain.from_iterable(itertools.combinations(range(8), count) for count in range(9)):
            for pack, left in zip(update[0], feed.without(update, bad)[0], strict=True):
                assert sorted(left.members) == sorted(set(pack.members) - set(bad))
                assert left.positions <= pack.positions <= 75
                assert left.logical == sum(map(sum, (shapes[member] for member in left.members)))


def test_the_plan_that_is_printed_is_the_plan_that_runs() -> None:
    """Both balance ranks by what a pack costs the model at hand, not by the proportions of a larger one."""
    chosen = config(ranks=2, max_positions=400, packs_per_update=4)
    examples = rows([(0, 300), *[(20, 18)] * 17, (0, 390), (40, 90), (40, 90), (40, 90), (0, 180), (0, 180)])
    forest = build_forest([example.keys for example in examples], chosen.pack.min_shared)
    printed = plan_training(chosen, forest, chosen.ranks).epoch(0)
    run = Feed(chosen, examples, ranks(2)).plan.epoch(0)
    assert run.digest == printed.digest
    assert run.cost == printed.cost == plan_heldout(chosen, forest, 2).cost == Cost.under(chosen) != Cost()
    of_another = plan_run(forest.lengths, forest, chosen.pack, 2, chosen.seed, updates=2).epoch(0)
    assert of_another.digest != printed.digest


@pytest.mark.parametrize("text", ["scan.png: it is gone", "train.jsonl:1: the row has changed"])
def test_what_is_unreadable_is_named_once(text: str) -> None:
    class Gone:
        def load(self) -> None:
            raise UserError(text)

    examples = rows([(10, 5)])
    feed = Feed(config(max_positions=75, packs_per_update=1), examples, ranks())
    examples[0].images = (Gone(),)  # type: ignore[assignment]
    named = "train.jsonl:1: " + text.removeprefix("train.jsonl:1: ")
    assert feed._unreadable(feed.plan.epoch(0).updates[0][0]) == {0: named}


def test_the_digest_is_of_what_the_examples_are_not_only_of_their_lengths() -> None:
    chosen = config(max_positions=75, packs_per_update=2)
    shapes = [(10, 30), (10, 30), (10, 5)]
    feed, again = (Feed(chosen, rows(shapes), ranks()) for _ in range(2))
    other, weighed = rows(shapes), rows(shapes)
    other[1].keys = np.where(other[1].keys == 1, 7, other[1].keys)
    weighed[1].target = ~weighed[1].target
    assert again.digest == feed.digest
    for changed in (other, weighed):
        run = Feed(chosen, changed, ranks())
        assert run.plan.epoch(0).digest == feed.plan.epoch(0).digest
        assert run.digest != feed.digest


def test_every_plan_goes_through_one_place() -> None:
    for module in (feeds, heldout, lengths, outcome):
        assert not {"plan_run", "plan_epoch", "plan_evaluation"} & vars(module).keys(), module.__name__
