"""Held-out quality: losses through packs, and answers generated with each shared beginning computed once.

M targets of a pack, E (example, target) entries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs import metric_names, runfolder
from configs.errors import UserError
from configs.schema import EvaluateConfig
from prefix_train.collate import Batch, collate, entry_weights
from prefix_train.data import rows_of
from prefix_train.generate import Counts, greedy
from prefix_train.metrics import Answer, Metric, OwnMetric
from prefix_train.render import Example

if TYPE_CHECKING:
    from prefix_train.dist import Ranks
    from prefix_train.model import Root
    from prefix_train.plan import Pack

PREDICTIONS = "predictions.jsonl"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Scored:
    """All answers in the file's order, each with its scores by metric, and what they come to.

    mistake: of a user's metric, which then has no scores; everything else is there all the same.
    """

    answers: list[Answer]
    scores: list[dict[str, Any]]
    metrics: dict[str, Any]
    counts: dict[str, int]
    mistake: str | None


def example_losses(each: Tensor, batch: Batch) -> dict[int, float]:
    """Mean cross-entropy of each member's target tokens. each: [M], as the root returns it."""
    targets = batch.targets
    losses = each.double()[targets.entry_target]
    zeros = losses.new_zeros(len(batch.members))
    sums = zeros.index_add(0, targets.entry_example, losses)
    counts = zeros.index_add(0, targets.entry_example, torch.ones_like(losses))
    return dict(zip(batch.members, (sums / counts).tolist(), strict=True))


@torch.no_grad()
def losses(root: Root, packs: Sequence[Pack], examples: Sequence[Example], ranks: Ranks) -> dict[int, float]:
    """Loss of each example in this rank's `packs`, by its index: its target tokens' mean cross-entropy.

    Every rank must be given equally many packs (empty ones count), since each issues the sharding's collectives.
    Raises UserError, on every rank, for an example that one of them cannot read.
    """
    counts = [int(examples[member].target.sum()) for pack in packs for member in pack.members]
    weights = entry_weights("example", counts or [1])
    found: dict[int, float] = {}
    for pack in packs:
        batch = ranks.together(partial(collate, pack, examples, weights)).to(ranks.device)
        found |= example_losses(root(batch).each, batch)
    return found


def answers(
    model: PreTrainedModel,
    tokenizer: Any,
    examples: Sequence[Example],
    config: EvaluateConfig,
    min_shared: int,
) -> tuple[list[Answer], Counts]:
    """Greedy answers of an unpatched `model` to the prompts of `examples`, and how many tokens that took."""
    ends = end_tokens(model, tokenizer)
    generated, counts = greedy(
        model, examples, config.max_new_tokens, ends, min_shared=min_shared, cache_tokens=config.cache_tokens
    )
    found = []
    for example, tokens in zip(examples, generated, strict=True):
        complete = bool(tokens) and tokens[-1] in ends
        text = tokenizer.decode(tokens[:-1] if complete else tokens, skip_special_tokens=False)
        found.append(Answer(example.id, example.source, example.answer, text, complete, len(tokens)))
    return found, counts


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: the tokenizer's, and those of the model's generation settings."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    listed = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in [*listed, tokenizer.eos_token_id] if token is not None})


def shares(order: Sequence[int], world: int) -> list[list[int]]:
    """Examples for each of `world` ranks, equally many but for one: neighbours in the tree stay together."""
    return [list(order[rank * len(order) // world : (rank + 1) * len(order) // world]) for rank in range(world)]


def score(
    mine: Sequence[tuple[int, Answer]], counts: Counts, metrics: Sequence[Metric], data: Path, ranks: Ranks
) -> Scored:
    """Score this rank's answers, (index in the file, answer), and gather those of all ranks; the same on every rank.

    Every rank calls it, also with no answer. What a user's metric raises is kept, so that no rank waits for another.
    """
    scores, mistakes = ranks.together(lambda: _score([answer for _, answer in mine], metrics, data))
    parts = [[index, asdict(answer), one] for (index, answer), one in zip(mine, scores, strict=True)]
    gathered = ranks.gather({"parts": parts, "mistakes": mistakes, "counts": asdict(counts)})
    for rank in reversed(gathered):
        mistakes |= rank["mistakes"]
    every = sorted((part for rank in gathered for part in rank["parts"]), key=lambda part: part[0])
    whole = {name: sum(rank["counts"][name] for rank in gathered) for name in asdict(counts)}
    return _summed([(Answer(**answer), scores) for _, answer, scores in every], metrics, mistakes, whole)


def _score(
    answers: Sequence[Answer], metrics: Sequence[Metric], data: Path
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Scores of each answer by metric, and for each metric that failed the first mistake.

    Raises UserError where a user's metric needs the rows of `data` and one cannot be read.
    """
    scores: list[dict[str, Any]] = [{} for _ in answers]
    mistakes: dict[str, str] = {}
    places: dict[str, list[int]] = {}
    for place, answer in enumerate(answers):
        places.setdefault(row_of(answer.source), []).append(place)
    for name, row in read_rows(data, places) if any_own(metrics) else ((name, {}) for name in places):
        for place, metric in product(places[name], metrics):
            if metric.name not in mistakes:
                try:
                    scores[place][metric.name] = metric.score(answers[place], row)
                except UserError as error:
                    mistakes[metric.name] = str(error)
    return scores, mistakes


def _summed(
    every: Sequence[tuple[Answer, dict[str, Any]]],
    metrics: Sequence[Metric],
    mistakes: dict[str, str],
    counts: dict[str, int],
) -> Scored:
    """All ranks' answers and scores as one; a metric with a mistake has none."""
    summaries: dict[str, Any] = {}
    for metric in metrics:
        found = [value for _, scores in every if (value := scores.get(metric.name)) is not None]
        if metric.name in mistakes or not found:
            continue
        try:
            summaries[metric.name] = metric.summary(found)
        except UserError as error:
            mistakes[metric.name] = str(error)
    kept = [{name: value for name, value in scores.items() if name not in mistakes} for _, scores in every]
    return Scored([answer for answer, _ in every], kept, summaries, counts, next(iter(mistakes.values()), None))


def any_own(metrics: Sequence[Metric]) -> bool:
    """Is one of them a user's?"""
    return any(isinstance(metric, OwnMetric) for metric in metrics)


def read_rows(data: Path, names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those rows of `data` whose `file:line` is in `names`, each with it; one at a time, as far as they are needed.

    Raises UserError where one cannot be read or is not there.
    """
    wanted = set(names)
    rows = rows_of(data)
    for line in rows if wanted else ():
        if line.source in wanted:
            yield line.source, rows.record(line)
            wanted.remove(line.source)
            if not wanted:
                return
    if wanted:
        raise UserError(f"{min(wanted)}: the row is not there any more")


def row_of(source: str) -> str:
    """`file:line` of an example, which may be one of several targets of its row."""
    return re.sub(r"(:\d+) target \d+$", r"\1", source)


def try_out(metrics: Sequence[Metric], example: Example, data: Path) -> None:
    """Score the target of the first example as if it had been answered, before anything is trained for it.

    Raises UserError where a user's metric cannot.
    """
    if not any_own(metrics):
        return
    ((_, row),) = read_rows(data, [row_of(example.source)])
    right = Answer(example.id, example.source, example.answer, example.answer, True, 0)
    for metric in metrics:
        metric.score(right, row)


def figures(scored: Scored) -> dict[str, Any]:
    """What result.json says of the answers."""
    found: dict[str, Any] = {"metrics": scored.metrics, "generated": scored.counts}
    if metric_names.EXACT in scored.metrics:
        found["accuracy"] = scored.metrics[metric_names.EXACT]
    found["fields"] = scored.metrics.get(metric_names.JSON, {}).get("fields", {})
    return found | ({} if scored.mistake is None else {"mistake": scored.mistake})


def lines(result: Mapping[str, Any]) -> list[str]:
    """What a person wants to know of the answers that `figures` tells of."""
    said = []
    found = dict(result.get("metrics", {}))
    if (exact := found.pop(metric_names.EXACT, None)) is not None:
        chance = "" if result.get("chance") is None else f"; chance is {result['chance']:.0%}"
        said.append(f"answered exactly {exact:.1%}{chance}")
    if (fields := found.pop(metric_names.JSON, None)) is not None:
        each = ", ".join(f"{name} {share:.1%}" for name, share in fields["fields"].items())
        said.append(
            f"JSON: {fields['valid']:.1%} of {fields['examples']} answers valid, {fields['right']:.1%} of fields right"
            f" ({each}); {fields['missing']} missing, {fields['extra']} extra"
        )
    for name, value in found.items():
        means = value if isinstance(value, dict) else {"": value}
        said.append(f"{name}: " + ", ".join(f"{key} {one:.4g}".strip() for key, one in means.items()))
    if "generated" in result:
        counts = result["generated"]
        times = counts["logical"] / counts["prompt"]
        said.append(
            f"generated {counts['answers']:,} tokens; {counts['prompt']:,} prompt tokens computed for "
            f"{counts['logical']:,}: {times:.1f} times fewer"
        )
    return said


def write(
    folder: Path, scored: Scored | None, losses: Mapping[int, float], summary: Mapping[str, Any], run: Path | None
) -> Path:
    """Write every prediction as a line of JSON, then `summary`; the file of predictions.

    scored: none where nothing was generated. losses: of the examples, by index. run: whose later lives forbid it; none
    where a person asks, who belongs to no life.
    """
    path = folder / PREDICTIONS
    if scored is None:
        path.unlink(missing_ok=True)  # an earlier evaluation's, which this summary does not speak of
    else:
        runfolder.write_text(path, "".join(_lines(scored, losses)), run=run)
    runfolder.write_json(folder / SUMMARY, summary, run=run)
    return path


def _lines(scored: Scored, losses: Mapping[int, float]) -> Iterator[str]:
    """A line of JSON for each answer."""
    for index, (answer, scores) in enumerate(zip(scored.answers, scored.scores, strict=True)):
        line = {
            "line": int(row_of(answer.source).rpartition(":")[2]),
            "id": answer.id,
            "source": answer.source,
            "prediction": answer.text,
            "target": answer.expected,
            "metrics": scores,
            "finish": "stop" if answer.complete else "length",
            "tokens": answer.tokens,
            **({"loss": losses[index]} if index in losses else {}),
        }
        yield json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
