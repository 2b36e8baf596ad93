"""Held-out quality: losses through packs, and answers generated with each shared prefix computed once.

M targets of a pack, E (example, target) entries.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from prefix_train.collate import Batch, collate, entry_weights
from prefix_train.generate import greedy
from prefix_train.render import Example

if TYPE_CHECKING:
    from prefix_train.dist import Ranks
    from prefix_train.model import Root
    from prefix_train.plan import Pack


@dataclass(frozen=True)
class Answer:
    """What the model answered to one held-out example. text: without the end token. complete: an end token came."""

    id: str
    source: str
    expected: str
    text: str
    complete: bool

    @property
    def exact(self) -> bool:
        """Is it the expected answer, letter by letter?"""
        return self.complete and self.text == self.expected


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
    model: PreTrainedModel, tokenizer: Any, examples: Sequence[Example], max_new_tokens: int, min_shared: int
) -> list[Answer]:
    """Greedy answers of an unpatched `model` to the prompts of `examples`."""
    ends = end_tokens(model, tokenizer)
    generated = greedy(model, examples, max_new_tokens, ends, min_shared=min_shared)
    found = []
    for example, tokens in zip(examples, generated, strict=True):
        complete = bool(tokens) and tokens[-1] in ends
        text = tokenizer.decode(tokens[:-1] if complete else tokens, skip_special_tokens=False)
        found.append(Answer(example.id, example.source, example.answer, text, complete))
    return found


def end_tokens(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: the tokenizer's, and those of the model's generation settings."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    listed = configured if isinstance(configured, list) else [configured]
    return sorted({token for token in [*listed, tokenizer.eos_token_id] if token is not None})


def accuracy(found: Sequence[Answer]) -> dict[str, Any]:
    """Share of exact answers, and where the expected answers are JSON objects the share of each field that is right."""
    fields: dict[str, list[bool]] = {}
    for answer in found:
        expected, given = _object(answer.expected), _object(answer.text)
        for key, value in (expected or {}).items():
            fields.setdefault(key, []).append(given is not None and key in given and given[key] == value)
    return {
        "examples": len(found),
        "exact": sum(answer.exact for answer in found) / len(found),
        "fields": {key: sum(right) / len(right) for key, right in fields.items()},
    }


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
