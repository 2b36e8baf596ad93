"""`prefix-train verify --engine stream`: independent checks of the streaming engine on a run's own store and data.

Four ways compute the same examples with the same adapters: transformers' own model, each example alone, in float64,
also where its classes ask for float32; the resident engine; and the streaming engine with no, one and all blocks
resident. All have the store's weights, so that what is due to 4 bits is not put down to streaming. Dropout is off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from configs.schema import Config
from configs.wording import counted
from prefix_train import anatomy, engines, gradients, lengths, machine, step, verify
from prefix_train import model as models
from prefix_train.bench_gate import plain_torch
from prefix_train.collate import Batch, collate, entry_weights
from prefix_train.data import load_examples
from prefix_train.dist import Ranks
from prefix_train.dropout import seed_of
from prefix_train.feed import shape_of
from prefix_train.packing import Pack
from prefix_train.plan import plan_heldout
from prefix_train.render import Example, Renderer
from prefix_train.stream import engine, figures, planner
from prefix_train.stream.engine import Streamed
from prefix_train.stream.progress import Progress
from prefix_train.stream.schedule import reads
from prefix_train.stream.store import Store
from prefix_train.tensors import digest
from prefix_train.tree import build_forest
from prefix_train.verify import Half

ROUNDING = {torch.bfloat16: 0.15, torch.float32: 1e-3}
"""Largest relative difference of a gradient tensor to float64 that passes: what rounding leaves, by dtype."""


@dataclass(frozen=True)
class Check:
    """One line of the table. found: what was measured; bound: what would have been right."""

    name: str
    passed: bool
    found: str
    bound: str


@dataclass(frozen=True)
class Subject:
    """What is checked. examples: as many as asked for, in `packs`. device: where both engines compute."""

    config: Config
    store: Store
    examples: Sequence[Example]
    packs: Sequence[Pack]
    device: torch.device

    @classmethod
    def of(cls, config: Config, examples: int, device: torch.device) -> Subject:
        """The first examples of the run's held-out data, or of its training data. UserError as in training."""
        config = machine.settle(replace(config, adapter=replace(config.adapter, dropout=0.0)), device)
        _, processor = engines.load(config)
        renderer = Renderer(processor, models.skeleton(config.model).config, targets=config.data.targets)
        most = lengths.longest_accepted(config)
        path = Path(config.data.heldout or config.data.train)
        chosen = load_examples(path, renderer, most, config.data.on_bad_example)[:examples]
        forest = build_forest((example.keys for example in chosen), config.pack.min_shared)
        packs = tuple(pack for pack in plan_heldout(config, forest, ranks=1).updates[0][0] if pack.members)
        return cls(config, engines.open_store(config), chosen, packs, device)

    def streamed(self, resident: int) -> Streamed:
        """The streaming engine with so many blocks resident."""
        model, _ = engine.load(self.config.model, self.store)
        prepared = engine.prepare(model, self.config)
        draw_adapters(prepared)
        return Streamed(prepared, self.config, self.store, self.device, self.images, resident)

    def resident(self) -> models.Root:
        """The resident engine."""
        model, _ = engine.load(self.config.model, self.store, whole=True)
        prepared = models.prepare(model, self.config)
        draw_adapters(prepared)
        train, dtype = self.config.train, models.DTYPES[self.config.model.dtype]
        root = models.Root(prepared, dtype, train.loss_chunk_rows, self.images, train.loss_chunk_words)
        return root.to(self.device)

    def alone(self, examples: Sequence[Example]) -> Half:
        """transformers' own model in float64."""
        model, _ = engine.load(self.config.model, self.store, whole=True)
        adapted = models.adapt(model, self.config)
        draw_adapters(adapted)
        adapted.to(self.device, torch.float64)
        with plain_torch(anatomy.find(adapted).decoder), Wide():
            return verify.standalone(adapted, examples)

    @property
    def images(self) -> bool:
        """Has any example one?"""
        return any(example.images for example in self.examples)

    def batches(self) -> list[Batch]:
        """The packs, weighted as one update."""
        counts = [int(self.examples[member].target.sum()) for pack in self.packs for member in pack.members]
        weights = entry_weights("example", counts)
        return [collate(pack, self.examples, weights) for pack in self.packs]


class Wide(TorchFunctionMode):
    """Within it whatever is asked for in float32 comes in float64: norms, softmax, rotary angles, recurrences."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        return func(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def draw_adapters(model: nn.Module) -> None:
    """Let no adapter be zero, or half of the gradients would be: the same numbers for the same names."""
    with torch.no_grad():
        for name, parameter in anatomy.trainable(model).items():
            if "lora_B" in name:
                draw = torch.Generator().manual_seed(seed_of("verify", name))
                parameter.normal_(0.0, 0.02, generator=draw)


def run(config: Config, examples: int, device: torch.device, say: Callable[[str], None]) -> list[Check]:
    """All checks. Raises UserError for a store or data that cannot be used at all. say: gets lines of progress."""
    opened = engines.open_store(config)
    say(f"reading every byte of {opened.folder}")
    Store.open(opened.folder, check="hash")
    subject = Subject.of(config, examples, device)
    blocks = len(subject.store.layers)
    roots: list[tuple[str, Callable[[], models.Root]]] = [
        ("resident engine", subject.resident),
        ("no block resident", lambda: subject.streamed(0)),
        ("one block resident", lambda: subject.streamed(1)),
        ("all blocks resident", lambda: subject.streamed(blocks)),
    ]
    progress = Progress(_work(subject, [name for name, _ in roots]), say)
    halves = {
        name: verify.packed(make(), progress.part(subject.packs, "pack"), subject.examples) for name, make in roots
    }
    alone = subject.alone(progress.part(subject.examples, "example"))
    progress.part(subject.packs, "pack")
    return [
        Check("store", True, counted(len(subject.store.blocks), "file"), "every byte as it was written"),
        *_same(halves),
        *(_near(name, half, alone, subject.config) for name, half in halves.items()),
        *_update(subject),
    ]


def _work(subject: Subject, names: Sequence[str]) -> dict[str, float]:
    """Parts of the comparison by what they compute: rows of float32, of which float64 takes twice as long."""
    positions = sum(pack.positions for pack in subject.packs)
    alone = sum(len(example.ids) for example in subject.examples)
    return {**dict.fromkeys(names, positions), "autograd in float64": 2 * alone, "one update": positions}


def _same(halves: dict[str, Half]) -> list[Check]:
    """Streamed gradients and losses are the resident engine's, to the bit."""
    (_, theirs), *streamed = halves.items()
    found = []
    for name, mine in streamed:
        unlike = [key for key, tensor in theirs.gradients.items() if not torch.equal(tensor, mine.gradients[key])]
        equal = len(theirs.gradients) - len(unlike)
        told = f"{equal} of {counted(len(theirs.gradients), 'gradient')} equal" + (
            f", {unlike[0]} is not" if unlike else ""
        )
        told += "" if mine.losses == theirs.losses else ", losses differ"
        passed = not unlike and mine.losses == theirs.losses
        found.append(Check(f"{name}: as the resident engine", passed, told, "equal to the bit"))
    return found


def _near(name: str, half: Half, alone: Half, config: Config) -> Check:
    """Loss before any update, and gradients, are those of transformers' own model."""
    dtype = models.DTYPES[config.model.dtype]
    bounds = replace(verify.bounds_for(config.verify, dtype), gradient=config.verify.gradient or ROUNDING[dtype])
    found = verify.compare(half, alone, bounds)
    told = found["differences"]
    return Check(
        f"{name}: as autograd in float64",
        found["passed"],
        f"mean loss off by {told['mean_loss']:.1e}, worst gradient by {told['gradient']:.1e}",
        f"{bounds.mean_loss:.0e} and {bounds.gradient:.0e}",
    )


def _update(subject: Subject) -> list[Check]:
    """One update of the streaming engine: what it visits, reads, counts, holds and changes."""
    plan = planner.make(subject.config, _largest(subject))
    root = subject.streamed(plan.resident)
    parameters, batches = anatomy.trainable(root.model), subject.batches()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3)
    names = frozenset(name for name in parameters if ".visual." in name)
    coverage = gradients.Coverage(list(parameters), names, warmup=2)
    alone = Ranks(0, 1, subject.device, None)
    stepper = step.Stepper(root, parameters, optimizer, alone, coverage, 0, subject.config.train.clip_norm)
    if subject.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(subject.device)
    result = step.update(stepper, 0, 1e-3, batches)
    return [
        *_changes(before, parameters, coverage),
        *_traffic(root, plan, -(-len(batches) // root.at_once)),
        _tokens(result, batches, subject.packs),
        _memory(root, plan),
    ]


def _largest(subject: Subject) -> Any:
    targets = [int(example.target.sum()) for example in subject.examples]
    return max((shape_of(pack, targets) for pack in subject.packs), key=lambda shape: shape.positions)


def _changes(before: dict[str, Tensor], now: dict[str, nn.Parameter], coverage: gradients.Coverage) -> list[Check]:
    waiting, total = coverage.waiting, len(now)
    still = [name for name, tensor in before.items() if torch.equal(tensor, now[name])]
    hashes = [digest(dict(tensors))[:12] for tensors in (before, now)]
    return [
        Check("every adapter has a gradient", not waiting, f"{total - len(waiting)} of {total}", "all"),
        Check(
            "the adapters change",
            hashes[0] != hashes[1] and not set(still) - set(waiting),
            f"{hashes[0]} -> {hashes[1]}, {counted(len(still), 'tensor')} the same",
            "another hash, every tensor",
        ),
    ]


def _traffic(root: Streamed, plan: planner.Plan, passes: int) -> list[Check]:
    figures_now, blocks = root.ring.figures, len(root.ring.units)
    lowest = 0 if any(".merger." in name for name in anatomy.trainable(root.model)) and root.images else root.lowest
    visits = passes * (2 * blocks - lowest)
    planned = sum(reads(blocks, lowest, plan.config.stream.slots, plan.resident, passes))
    return [
        Check("visits of blocks", figures_now.visits == visits, f"{figures_now.visits}", f"{visits}"),
        Check("blocks that were read", figures_now.reads == planned, f"{figures_now.reads}", f"{planned}"),
    ]


def _tokens(result: step.StepResult, batches: Sequence[Batch], packs: Sequence[Pack]) -> Check:
    counted = figures.count(batches)
    told = (result.positions, result.logical, result.targets)
    right = counted == told and counted[0] == sum(pack.positions for pack in packs)
    names = "positions, logical tokens, targets"
    return Check("tokens counted from tensors", right, f"{told} {names}", f"{counted}")


def _memory(root: Streamed, plan: planner.Plan) -> Check:
    terms = {term.name: term.bytes for term in plan.budget.terms}
    held = root.ring.held_bytes + root.head.ring.held_bytes
    planned = terms["slots"] + terms["resident blocks"] + terms["tiles of the head"]
    most, within = plan.needed, plan.fits
    told = f"{held:,} B in slots"
    if root.source.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(root.source.device) + plan.beside
        told += f", peak {peak:,} B"
        within &= peak <= plan.limit
    return Check("memory", held == planned and within, told, f"{planned:,} B in slots, {most:,} B in all")


def table(found: Sequence[Check]) -> str:
    """As a person reads it."""
    width = max(len(check.name) for check in found)
    lines = [
        f"{'pass' if check.passed else 'FAIL'}  {check.name:<{width}}  {check.found}  (right: {check.bound})"
        for check in found
    ]
    failed = sum(not check.passed for check in found)
    return "\n".join([*lines, f"{len(found) - failed} of {counted(len(found), 'check')} passed"])


def summary(found: Sequence[Check]) -> dict[str, Any]:
    """As JSON has it."""
    return {"passed": all(check.passed for check in found), "checks": [asdict(check) for check in found]}
