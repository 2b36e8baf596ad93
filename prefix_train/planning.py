"""`prefix-train plan`: all of the data is read, what is bad in it is collected, the rest is planned and told of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from configs import compose
from configs.errors import UserError
from configs.modelpath import from_pretrained_arguments, locate
from configs.schema import Config, ModelConfig
from configs.wording import counted
from prefix_train import lengths, near_misses, plan_summary, prompts, sharing, tables, tiny
from prefix_train.budget import Cost
from prefix_train.data import Examples, load_examples
from prefix_train.lengths import LengthIndex
from prefix_train.plan import RunPlan, plan_epoch
from prefix_train.render import Renderer
from prefix_train.sharing import Size
from prefix_train.template import Targets
from prefix_train.tree import Trie

LEAST_POSITIONS = 8192
"""Of packs that are planned for data by itself, where their size is not given."""

LISTED = 20
"""Examples that are too long, of those that JSON and the page name."""

SHOWN = 5
"""Lines that the text has of examples that are left out; JSON has all."""


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan and what it was made of.

    config: with the size of packs that was used. made_up: whether that was chosen here. cap: tokens of the longest
    example that is accepted. misses: see `near_misses.summary`; none where they were not looked for. sizes: what packs
    of other sizes come to.
    """

    config: Config
    made_up: bool
    cap: int
    renderer: Renderer
    examples: Examples
    index: LengthIndex
    run: RunPlan
    misses: Sequence[dict[str, Any]] | None
    sizes: Sequence[Size]

    @property
    def refused(self) -> str:
        """Why a run would not start; empty where it would."""
        skipped = self.examples.skipped
        if not skipped or self.config.data.on_bad_example == "skip":
            return ""
        more = f" (bad examples: {len(skipped):,} in all)" if len(skipped) > 1 else ""
        return f"{skipped[0]}{more}"

    def text_of(self, example: int, start: int, count: int) -> str:
        """So many tokens of an example from `start` on, as text."""
        return self.renderer.text_of(self.examples[example].keys[start : start + count])


def is_data(path: Path) -> bool:
    """Whether `path` is examples rather than a configuration or a run folder."""
    if path.is_dir():
        return not (path / "config.yaml").is_file() and (tables.is_table(path) or prompts.is_prompts(path))
    return path.suffix == ".jsonl" or tables.is_table(path)


def of_data(data: Path, model: Path | None, overrides: Sequence[str]) -> Config:
    """A configuration for data by itself: everything that has no default is made up."""
    if model is None:
        raise UserError(f"{data} is data: say for which model, as in `prefix-train plan {data} --model FOLDER`")
    made_up = [f"data.train={data}", f"model.path={model}", "train.epochs=1", "cluster=local"]
    if not any(override.startswith("pack.examples_per_update") for override in overrides):
        made_up += ["pack.packs_per_update=1", "slurm.tasks_per_node=1"]
    return compose.with_changes(Config(), [*made_up, *overrides])


def renderer_of(model: ModelConfig, targets: Targets = "last") -> Renderer:
    """What renders examples for `model`: its processor or tokenizer, and its position index; no weights are loaded.

    targets: see Renderer.
    """
    if model.path is None:
        config = tiny.build_config(model.build)
        return Renderer(tiny.build_processor(config), config, targets=targets)
    path = locate(model.path)
    processor = tiny.load_processor(path)
    folder, more = from_pretrained_arguments(path)
    own = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **more)
    return Renderer(processor, own, targets=targets)


def make(config: Config, keep: bool, choose_size: bool, advise: bool = True) -> Planned:
    """Read the data of `config` and plan it.

    keep: write the length index, where a run could use it. choose_size: let the packs be as large as the longest
    example needs. advise: look for near misses, which takes a plan or two for each that is listed. Bad examples are
    collected whatever `data.on_bad_example`; UserError is raised where nothing is left, or nothing can be read.
    """
    renderer, trie = renderer_of(config.model, config.data.targets), Trie()
    cap = 1 << 40 if choose_size else lengths.longest_accepted(config)
    examples = load_examples(Path(config.data.train), renderer, cap, "skip")
    cut = bool(examples.too_long)
    index = lengths.build(config, examples, examples.skipped, trie=trie, cut=cut)
    if choose_size:
        twice = 2 * int(index.lengths.max())
        size = max(LEAST_POSITIONS, 1 << (twice - 1).bit_length())
        config = replace(config, pack=replace(config.pack, max_positions=size))
    if keep and (not examples.skipped or config.data.on_bad_example == "skip"):
        lengths.write(lengths.index_path(config, cut=cut), index)
    run = lengths.run_plan(config, index)
    misses = _near_misses(config, trie, index, renderer) if advise else None
    shared = config.pack.mode == "shared"
    sizes = sharing.sizes(index.forest, config.pack.min_shared, config.pack.max_positions) if shared else []
    return Planned(config, choose_size, cap, renderer, examples, index, run, misses, sizes)


def _near_misses(config: Config, trie: Trie, index: LengthIndex, renderer: Renderer) -> list[dict[str, Any]]:
    """What is nearly shared among the examples of `trie`, which are merged there, as JSON has it."""
    whole = trie.copy()
    found = near_misses.planned(near_misses.find(trie), whole, lambda tree: positions(config, tree))
    return near_misses.summary(found, index.sources, renderer.text_of)


def positions(config: Config, trie: Trie) -> int:
    """Those of the first epoch's plan of the examples in `trie`."""
    forest = trie.forest(config.pack.min_shared)
    plan = plan_epoch(forest.lengths, forest, config.pack, config.ranks, config.seed, 0, cost=Cost.under(config))
    return sum(pack.positions for pack in plan.packs)


def summary(planned: Planned) -> dict[str, Any]:
    """The first epoch's plan, and what was found in the data, as JSON has them."""
    too_long = sorted(planned.examples.too_long, key=lambda one: -one[1])
    sources = planned.index.sources
    return {
        **plan_summary.summary(planned.run.epoch(0)),
        "updates_in_run": planned.run.total,
        "epochs": planned.config.train.epochs,
        "shared": sharing.summary(planned.index.forest, sources, planned.text_of),
        "sizes": [asdict(size) for size in planned.sizes],
        "too_long": {
            "examples": len(too_long),
            "cap": planned.cap,
            "longest": [{"source": source, "tokens": tokens} for source, tokens in too_long[:LISTED]],
        },
        "skipped": list(planned.examples.skipped),
        "near_misses": planned.misses,
    }


def describe(planned: Planned, found: dict[str, Any]) -> str:
    """What a person reads of `found`, the summary; of a plan that no run would begin with, what is in its way alone."""
    if planned.refused:
        bad = (
            f"{counted(len(found['skipped']), 'example')} cannot be used; --json and --html have the plan of the others"
        )
        return _rows([("no plan", bad), *_left_out(planned, found)])
    rows = sharing.describe(found["shared"])
    pack, logical = planned.config.pack, found["logical_tokens"]
    if planned.made_up:
        rows.append(("pack size", f"pack.max_positions is not given; planned with {pack.max_positions:,}"))
    for size in found["sizes"]:
        ratio = f"{logical / size['positions']:.1f} times fewer positions, {counted(size['packs'], 'pack')} at least"
        rows.append(("packs of", f"{size['max_positions']:,}: {ratio}"))
    rows += _left_out(planned, found)
    return f"{plan_summary.told(found)}\n{_rows(rows)}{near_misses.describe(planned.misses or ())}"


def _rows(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<14}{text}" for name, text in rows)


def _left_out(planned: Planned, found: dict[str, Any]) -> list[tuple[str, str]]:
    """Examples that are not in the plan, and why."""
    rows: list[tuple[str, str]] = []
    if (too_long := found["too_long"])["examples"]:
        longest = too_long["longest"][0]
        rows.append(
            (
                "too long",
                f"examples of more than {planned.cap:,} tokens: {too_long['examples']:,}; the longest, "
                f"{longest['source']}, has {longest['tokens']:,}: {advice(planned, longest['tokens'])}",
            )
        )
    rows += [("left out", line) for line in found["skipped"][:SHOWN]]
    if (more := len(found["skipped"]) - SHOWN) > 0:
        rows.append(("left out", f"{more:,} more: see --json"))
    return rows


def advice(planned: Planned, longest: int) -> str:
    """What to do so that examples of up to `longest` tokens are accepted."""
    data, pack = planned.config.data, planned.config.pack
    options = [f"pack.max_positions={longest}"] if longest > pack.max_positions else []
    options += [f"data.max_example_tokens={longest}"] if longest > (data.max_example_tokens or longest) else []
    return (
        f"give {' and '.join(options)} (`prefix-train budget` says what that needs), shorten them, or leave them out "
        "with data.on_bad_example=skip"
    )
