"""Which examples meet in which pack, on which rank, in which update: a pure function of (data, seed, epoch).

Every rank computes the same plan and the ranks compare its digest. N examples, R ranks. No torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from configs.errors import UserError
from configs.schema import Config, PackConfig
from prefix_train.budget import Cost
from prefix_train.packing import EMPTY, Bound, Pack, Packer, Segment, Selection, examples_of, pack_of, standalone
from prefix_train.tree import Forest

Update = tuple[tuple[Pack, ...], ...]
"""For each rank its packs, the same number for every rank, in the order in which all of them run."""

__all__ = [
    "EMPTY",
    "Cursor",
    "Pack",
    "Plan",
    "RunPlan",
    "Step",
    "Totals",
    "Update",
    "plan_epoch",
    "plan_evaluation",
    "plan_heldout",
    "plan_run",
    "plan_training",
    "predicted_time",
    "totals",
]


@dataclass(frozen=True)
class Totals:
    """What the weights of one update are divided by: over all its packs, whatever the grouping."""

    examples: int
    targets: int


def totals(update: Update, targets: Sequence[int] | NDArray[np.int64]) -> Totals:
    """The update's denominators; targets: [N] target tokens of each example."""
    members = [member for pack in chain.from_iterable(update) for member in pack.members]
    return Totals(len(members), sum(int(targets[member]) for member in members))


def predicted_time(update: Update, cost: Cost) -> float:
    """Time of an update: ranks wait for each other in every layer, so each round of packs lasts as its slowest."""
    return sum(max(cost.of(pack.positions, pack.pairs) for pack in at_once) for at_once in zip(*update, strict=True))


@dataclass(frozen=True, eq=False)
class Plan:
    """The packs of one epoch, or of one evaluation.

    lengths: [N] tokens of each example. sources: where each stands, for messages. bound: (packs, positions) that no
    plan for the same examples, mode and cap can go below.
    """

    updates: tuple[Update, ...]
    ranks: int
    seed: int
    epoch: int
    pack: PackConfig
    cost: Cost
    lengths: tuple[int, ...]
    sources: tuple[str, ...] | None
    bound: tuple[int, int]

    @property
    def packs(self) -> Iterator[Pack]:
        """All packs, empty ones too, update by update and rank by rank."""
        return (pack for update in self.updates for rank in update for pack in rank)

    @cached_property
    def digest(self) -> str:
        """sha256 of everything that the ranks have to agree on."""
        header = [self.ranks, self.seed, self.epoch, asdict(self.pack), [len(update[0]) for update in self.updates]]
        numbers: list[int] = []
        for pack in self.packs:
            numbers += (len(pack.members), len(pack.lengths), *pack.members, *pack.lengths, *pack.parents)
            numbers += chain.from_iterable(pack.origin)
            numbers += chain.from_iterable((len(path), *path) for path in pack.paths)
        digest = hashlib.sha256(json.dumps(header).encode())
        digest.update(np.array(numbers, "<i8").tobytes())
        return digest.hexdigest()

    def source(self, example: int) -> str:
        """Where an example stands in the data."""
        return self.sources[example] if self.sources else f"example {example}"


def plan_epoch(
    lengths: Sequence[int] | NDArray[np.int64],
    forest: Forest,
    pack: PackConfig,
    ranks: int,
    seed: int,
    epoch: int,
    *,
    sources: Sequence[str] | None = None,
    cost: Cost | None = None,
) -> Plan:
    """Every example once. Which examples meet, and the order of packs, depend on (seed, epoch).

    The examples of an update do not depend on `ranks`, nor, with `examples_per_update`, on `mode`. Raises UserError
    naming the source of an example, or of a shared beginning, that no pack can hold.
    """
    if (pack.packs_per_update is None) == (pack.examples_per_update is None):
        raise UserError("give one of pack.packs_per_update and pack.examples_per_update")
    if (pack.packs_per_update or ranks) % ranks:
        raise UserError(f"pack.packs_per_update={pack.packs_per_update} is no multiple of the {ranks} ranks")
    planner = _Planner(lengths, forest, pack, ranks, sources, cost or Cost())
    random = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(2 * len(forest)).tolist()
    updates = planner.updates(random[: len(forest)], random[len(forest) :])
    return planner.plan(updates, seed, epoch)


def plan_evaluation(
    lengths: Sequence[int] | NDArray[np.int64],
    forest: Forest,
    pack: PackConfig,
    ranks: int,
    *,
    sources: Sequence[str] | None = None,
    cost: Cost | None = None,
) -> Plan:
    """Every example once, in one round without randomness: `updates` holds one entry, balanced over the ranks."""
    planner = _Planner(lengths, forest, pack, ranks, sources, cost or Cost())
    return planner.plan((planner.spread(range(len(forest)), range(len(forest))),), seed=0, epoch=0)


class _Planner:
    """Plans for one forest."""

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[np.int64],
        forest: Forest,
        pack: PackConfig,
        ranks: int,
        sources: Sequence[str] | None,
        cost: Cost,
    ) -> None:
        if not np.array_equal(lengths, forest.lengths):
            raise ValueError("the lengths are not those of the forest's examples")
        if not len(forest):
            raise UserError("there are no examples to plan")
        self._config, self._ranks, self._cost = pack, ranks, cost
        self._sources = None if sources is None else tuple(sources)
        self._lengths = tuple(forest.lengths.tolist())
        self._packer = Packer(forest, pack.min_shared)
        if max(self._lengths) > pack.max_positions:
            raise UserError(_too_long(forest, pack.max_positions, self._sources))

    def plan(self, updates: tuple[Update, ...], seed: int, epoch: int) -> Plan:
        """`updates` with what they were planned for, and the least packs and positions that any plan needs."""
        if self._config.mode == "standalone":
            bound = len(self._lengths), sum(self._lengths)
        else:
            bound = self._packer.bound(self._packer.select(range(len(self._lengths)))).at(self._config.max_positions)
        return Plan(updates, self._ranks, seed, epoch, self._config, self._cost, self._lengths, self._sources, bound)

    def updates(self, meet: Sequence[int], order: Sequence[int]) -> tuple[Update, ...]:
        """Packs of all examples in random order, cut into updates. meet, order: [N] random numbers."""
        examples: Sequence[int] = range(len(self._lengths))
        size = self._config.packs_per_update
        if size and self._config.mode == "standalone":
            examples = sorted(examples, key=order.__getitem__)
            return tuple(self.spread(examples[i : i + size], meet) for i in range(0, len(examples), size))
        packs = self._packer.pack(self._packer.select(examples), self._config.max_positions, meet)
        packs.sort(key=lambda roots: order[roots[0].first])
        if not size:
            size = self._config.examples_per_update or 1
            examples = examples_of(chain.from_iterable(packs))
            return tuple(self.spread(examples[i : i + size], meet) for i in range(0, len(examples), size))
        whole = len(packs) - len(packs) % size
        full = [pack_of(roots, self._lengths) for roots in packs[:whole]]
        updates = [self._balance(full[i : i + size]) for i in range(0, whole, size)]
        if rest := examples_of(chain.from_iterable(packs[whole:])):
            updates.append(self.spread(rest, meet))
        return tuple(updates)

    def spread(self, examples: Sequence[int], meet: Sequence[int]) -> Update:
        """One update with these examples: the fewest packs for each rank, as even as they can be made."""
        if self._config.mode == "standalone":
            return self._balance([standalone(example, self._lengths[example]) for example in examples])
        selection = self._packer.select(examples)
        bound = self._packer.bound(selection)
        longest = max(self._lengths[example] for example in examples)
        rounds = -(-bound.at(self._config.max_positions)[0] // self._ranks)
        while (packs := self._even(selection, bound, longest, rounds * self._ranks, meet)) is None:
            rounds += 1
        return self._balance([pack_of(roots, self._lengths) for roots in packs])

    def _even(
        self, selection: Selection, bound: Bound, longest: int, count: int, meet: Sequence[int]
    ) -> list[list[Segment]] | None:
        """At most `count` packs of about equal size; None where so few cannot hold the examples."""
        low, high = longest, self._config.max_positions
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if bound.at(middle)[0] <= count else (middle + 1, high)
        step = max(1, low // 128)
        while len(packs := self._packer.pack(selection, low, meet, per_pack=low)) > count:
            if low == self._config.max_positions:
                return None
            low, step = min(self._config.max_positions, low + step), step * 2
        return packs

    def _balance(self, packs: list[Pack]) -> Update:
        """Packs that run at once cost about the same, and the ranks' sums are as even as that allows."""
        cost = self._cost
        packs = packs + [EMPTY] * (-len(packs) % self._ranks)
        packs.sort(key=lambda pack: cost.of(pack.positions, pack.pairs), reverse=True)
        loads = [0.0] * self._ranks
        ranks: list[list[Pack]] = [[] for _ in loads]
        for first in range(0, len(packs), self._ranks):
            idle_first = sorted(range(self._ranks), key=loads.__getitem__)
            for rank, pack in zip(idle_first, packs[first : first + self._ranks], strict=True):
                ranks[rank].append(pack)
                loads[rank] += cost.of(pack.positions, pack.pairs)
        return tuple(tuple(rank) for rank in ranks)


def _too_long(forest: Forest, max_positions: int, sources: tuple[str, ...] | None) -> str:
    """What to say of the first example that no pack can hold."""
    lengths = forest.lengths
    over = np.flatnonzero(lengths > max_positions)
    first = int(over[0])
    place = sources[first] if sources else f"example {first}"
    last = int(forest.last[first])
    shared = int(forest.start[last]) if last not in forest.parent else int(lengths[first])
    what = f"its shared beginning of {shared:,}" if shared > max_positions else f"{int(lengths[first]):,}"
    return (
        f"{place}: {what} tokens do not fit into pack.max_positions={max_positions} ({len(over):,} of "
        f"{len(lengths):,} examples are too long, the longest has {int(lengths.max()):,} tokens): raise "
        "pack.max_positions, shorten the examples, or leave them out with data.on_bad_example=skip"
    )


@dataclass(frozen=True)
class Cursor:
    """Where a run stands: `number` updates are done, the next one is `update` of `epoch`."""

    number: int = 0
    epoch: int = 0
    update: int = 0


@dataclass(frozen=True, eq=False)
class Step:
    """One update of a run: where it stands, where the run stands after it, and its packs."""

    cursor: Cursor
    after: Cursor
    plan: Plan

    @property
    def update(self) -> Update:
        """For each rank its packs."""
        return self.plan.updates[self.cursor.update]


class RunPlan:
    """The updates of a run, epoch after epoch. total: how many there are."""

    def __init__(self, epoch: Callable[[int], Plan], total: int) -> None:
        self.epoch, self.total = epoch, total

    def walk(self, start: Cursor | None = None) -> Iterator[Step]:
        """The updates from `start` to the end of the run."""
        at = start or Cursor()
        while at.number < self.total:
            plan = self.epoch(at.epoch)
            after = replace(at, number=at.number + 1, update=at.update + 1)
            if after.update == len(plan.updates):
                after = Cursor(after.number, at.epoch + 1, 0)
            yield Step(at, after, plan)
            at = after


def plan_run(
    lengths: Sequence[int] | NDArray[np.int64],
    forest: Forest,
    pack: PackConfig,
    ranks: int,
    seed: int,
    *,
    updates: int | None = None,
    epochs: float | None = None,
    sources: Sequence[str] | None = None,
    cost: Cost | None = None,
) -> RunPlan:
    """A run of so many `updates`, going on with the next epoch where one ends, or of so many `epochs`."""
    if (updates is None) == (epochs is None):
        raise UserError("give one of train.updates and train.epochs")

    @lru_cache(maxsize=2)
    def epoch(number: int) -> Plan:
        return plan_epoch(lengths, forest, pack, ranks, seed, number, sources=sources, cost=cost)

    if updates is not None:
        return RunPlan(epoch, updates)
    assert epochs is not None
    whole = int(epochs)
    total = sum(len(epoch(number).updates) for number in range(whole))
    if part := epochs - whole:
        total += math.ceil(part * len(epoch(whole).updates) - 1e-9)
    return RunPlan(epoch, total)


def plan_training(config: Config, forest: Forest, ranks: int, sources: Sequence[str] | None = None) -> RunPlan:
    """The plan of the run that `config` describes: what is printed before it and what its ranks walk are both this."""
    return plan_run(
        forest.lengths,
        forest,
        config.pack,
        ranks,
        config.seed,
        updates=config.train.updates,
        epochs=config.train.epochs,
        sources=sources,
        cost=Cost.under(config),
    )


def plan_heldout(config: Config, forest: Forest, ranks: int, sources: Sequence[str] | None = None) -> Plan:
    """The plan of examples that are only looked at under `config`."""
    return plan_evaluation(forest.lengths, forest, config.pack, ranks, sources=sources, cost=Cost.under(config))
