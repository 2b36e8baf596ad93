"""What submit can say of the plan before the job makes it: from the length index, or that there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from configs.errors import UserError
from configs.modelpath import locate
from configs.schema import Config
from configs.wording import counted
from prefix_train import budget, kernel_choice, lengths, plan_summary
from prefix_train.budget import GIB, Shape
from prefix_train.lengths import LengthIndex
from prefix_train.plan import Plan
from prefix_train.stream import origin, planner

MOST_EXAMPLES = 20_000
"""Beyond this, planning alone takes longer than an answer on a login node should."""

NO_INDEX = "made by the job, for there is no length index yet (`prefix-train plan CONFIG` writes it)"

FIGURES = ("packs", "updates", "examples", "positions", "logical_tokens", "ratio", "digest")


def require(config: Config) -> None:
    """Raise UserError for what would end a run before its first update and can be known here: kernels are asked for
    that do not take the model; of a run that streams its store is not there or another model's, or the plan needs more
    than its budget.
    """
    if config.engine == "stream":
        sketch(config)
    else:
        _require_kernels(config)


def sketch(config: Config) -> dict[str, Any]:
    """Figures of the first epoch's plan under `known`, or under `unknown` why there are none. Raises as `require`.

    `memory` of `known`: predicted bytes of the pack with the most positions, on each GPU and pinned on each node. More
    than MOST_EXAMPLES are counted, not planned; `memory` is then that of one example as long as `pack.max_positions`.
    """
    _require_kernels(config)
    if config.engine == "stream":
        origin.require(config)
    found, largest = _sketch(config)
    if config.engine == "stream":
        _require_budget(config, largest)
    return found


def _require_kernels(config: Config) -> None:
    if config.model.path is not None and not locate(config.model.path).exists():
        return  # it may be there where the job runs
    kernel_choice.choose(config, kernel_choice.expected(config))


def _sketch(config: Config) -> tuple[dict[str, Any], Shape | None]:
    """What `sketch` says, and the plan's largest pack where that is known."""
    if not lengths.exists(config):
        return {"unknown": NO_INDEX}, None
    try:
        index = lengths.load(config)
        if len(index.forest) > MOST_EXAMPLES:
            tokens, least = int(index.lengths.sum()), int(index.forest.length.sum())
            longest = Shape.of([config.pack.max_positions], [-1], config.pack.max_positions)
            known: dict[str, Any] = {"examples": len(index.forest), "logical_tokens": tokens, "least_positions": least}
            return {"known": {**known, "memory": _memory(config, longest)}}, None
        run = lengths.run_plan(config, index)
        plan = run.epoch(0)
        largest = _largest(index, plan)
        memory = _memory(config, largest)
    except UserError as error:
        return {"unknown": str(error)}, None
    summary = plan_summary.summary(plan)
    known = {name: summary[name] for name in FIGURES} | {"updates_in_run": run.total, "memory": memory}
    return {"known": known}, largest


def _require_budget(config: Config, largest: Shape | None) -> None:
    """Of packs like the largest one; where that is not known, of a single position, without which nothing fits."""
    if largest is None:
        config = replace(config, pack=replace(config.pack, max_positions=1))
    planner.make(config, largest).refuse()


def _largest(index: LengthIndex, plan: Plan) -> Shape:
    """The plan's largest pack."""
    pack = max(plan.packs, key=lambda pack: (pack.positions, pack.pairs))
    return Shape.of(pack.lengths, pack.parents, int(index.targets[list(pack.members)].sum()))


def _memory(config: Config, shape: Shape) -> dict[str, int]:
    """What the budget says of a pack."""
    found = planner.make(config, shape).budget if config.engine == "stream" else budget.predict(config, shape)
    sizes = {"gpu_bytes": found.total("gpu"), "host_bytes_per_node": found.total("host")}
    return {"positions": shape.positions, **sizes}


def lines(config: Config, found: dict[str, Any]) -> list[str]:
    """`sketch`'s answer for people."""
    if "unknown" in found:
        why = found["unknown"] if found["unknown"] == NO_INDEX else f"not known: {found['unknown']}"
        return [f"plan    {why}", "memory  not known without a plan"]
    known = found["known"]
    if "packs" not in known:
        plan = (
            f"plan    {counted(known['examples'], 'example')} of {known['logical_tokens']:,} tokens, "
            f"{known['least_positions']:,} positions at best; packs and updates: prefix-train plan CONFIG"
        )
        return [plan, _sizes(config, known["memory"], "one example as long as pack.max_positions")]
    plan = (
        f"plan    {counted(known['updates_in_run'], 'update')}, {_epoch(config, known)}; "
        f"{counted(known['examples'], 'example')} in {counted(known['packs'], 'pack')}: "
        f"{known['positions']:,} positions for {known['logical_tokens']:,} logical tokens, "
        f"{known['ratio']:.1f} times fewer"
    )
    return [plan, _sizes(config, known["memory"], "the largest pack")]


def _epoch(config: Config, known: dict[str, Any]) -> str:
    """How many updates an epoch has, or the first one, where others differ."""
    epochs, updates = config.train.epochs, known["updates"]
    if epochs is None or known["updates_in_run"] == epochs * updates:
        return f"{updates:,} per epoch"
    return f"{updates:,} in the first of {epochs:g} epochs"


def _sizes(config: Config, memory: dict[str, int], what: str) -> str:
    """The line of `_memory`'s answer. On a CPU the process that holds the tensors takes more than they do."""
    gpus = config.slurm.gpus_per_node
    tensors = f"{_size(memory['gpu_bytes'])} {'on each GPU' if gpus else 'of tensors in each rank'}"
    pinned = f", {_size(memory['host_bytes_per_node'])} pinned on each node" if gpus else ""
    beside = "" if gpus else "; Python, torch and the data take more of the process"
    return f"memory  {tensors}{pinned}, predicted for {what} ({memory['positions']:,} positions){beside}"


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes == 0 or nbytes >= GIB / 10 else f"{nbytes / 2**20:.1f} MiB"
