"""Greedy answers with each shared prefix computed once, on transformers' own unpatched model and cache.

L tokens of a prompt, B prompts that are answered together. The prefix of a group runs once; its cache (keys and
values, convolution and recurrent states) is copied for the prompts that branch off it. Prompts of one group whose items
have equal lengths run as one batch, so that no padding ever enters a recurrent state.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from prefix_train.render import Example
from prefix_train.tree import build_forest


@dataclass(frozen=True)
class Group:
    """Prompts that begin with the same `prefix` tokens and go on for equally many: indices into the examples."""

    prefix: int
    members: tuple[int, ...]


def group_prompts(examples: Sequence[Example], min_shared: int, batch: int) -> list[Group]:
    """Group prompts by what they share; at least one token of each prompt stays outside the prefix."""
    keys = [example.keys[: example.prompt_length] for example in examples]
    forest = build_forest(keys, min_shared)
    alike: dict[tuple[tuple[int, ...], int, int], list[int]] = defaultdict(list)
    for index, prompt in enumerate(keys):
        path = forest.path(index)
        shared = int(forest.start[path[-1]])
        prefix = min(shared, len(prompt) - 1)
        alike[(path[:-1], prefix, len(prompt))].append(index)
    return [
        Group(prefix, tuple(members[at : at + batch]))
        for (_, prefix, _), members in sorted(alike.items())
        for at in range(0, len(members), batch)
    ]


@torch.no_grad()
def greedy(
    model: PreTrainedModel,
    examples: Sequence[Example],
    max_new_tokens: int,
    end_tokens: Sequence[int],
    *,
    min_shared: int = 16,
    batch: int = 64,
) -> list[list[int]]:
    """Answer each example's prompt; a list of token ids per example, its end token included where it came.

    model: unpatched; it is left in its own train or eval mode, so dropout must be off. Stops an answer at any of
    `end_tokens` or after `max_new_tokens`. Equal to `model.generate(do_sample=False)` token for token.
    """
    answers: list[list[int]] = [[] for _ in examples]
    shared: tuple[bytes, Any] = (b"", None)
    for group in group_prompts(examples, min_shared, batch):
        first = examples[group.members[0]]
        identity = first.keys[: group.prefix].tobytes()
        if group.prefix and shared[0] != identity:
            cache = DynamicCache(config=model.config)
            _forward(model, [first], 0, group.prefix, cache)
            shared = (identity, cache)
        cache = _fork(shared[1], len(group.members)) if group.prefix else DynamicCache(config=model.config)
        batch_examples = [examples[index] for index in group.members]
        for index, answer in zip(
            group.members, _decode(model, batch_examples, group.prefix, cache, max_new_tokens, end_tokens), strict=True
        ):
            answers[index] = answer
    return answers


def _decode(
    model: PreTrainedModel,
    examples: Sequence[Example],
    prefix: int,
    cache: DynamicCache,
    max_new_tokens: int,
    end_tokens: Sequence[int],
) -> list[list[int]]:
    length = examples[0].prompt_length
    logits = _forward(model, examples, prefix, length, cache)
    device = logits.device
    ends = torch.tensor(list(end_tokens), device=device)
    position = torch.tensor([int(e.position_ids[:, :length].max()) + 1 for e in examples], device=device)
    done = torch.zeros(len(examples), dtype=torch.bool, device=device)
    chosen: list[Tensor] = []
    live: list[Tensor] = []
    for step in range(max_new_tokens):
        token = logits.argmax(-1)
        chosen.append(token)
        live.append(~done)
        done |= torch.isin(token, ends)
        if bool(done.all()) or step + 1 == max_new_tokens:
            break
        ids = (position + step)[:, None]
        logits = model(
            input_ids=token[:, None],
            position_ids=ids.expand(3, -1, -1) if examples[0].position_ids.shape[0] == 3 else ids,
            cache=cache,
            use_cache=True,
        ).logits[:, -1]
    tokens, kept = torch.stack(chosen, 1).tolist(), torch.stack(live, 1).tolist()
    return [[t for t, keep in zip(row, rows, strict=True) if keep] for row, rows in zip(tokens, kept, strict=True)]


def _forward(model: PreTrainedModel, examples: Sequence[Example], start: int, end: int, cache: DynamicCache) -> Tensor:
    """Run tokens [start, end) of every example behind `cache`, which grows by them; logits [B, V] of the last one."""
    device = model.device
    ids = torch.from_numpy(np.stack([example.ids[start:end] for example in examples])).to(device)
    position_ids = torch.from_numpy(np.stack([example.position_ids[:, start:end] for example in examples], 1))
    inputs: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": (position_ids if len(position_ids) == 3 else position_ids[0]).to(device),
    }
    images = [image for example in examples for image in _images(example, start, end)]
    if images:
        pixels = np.concatenate([image.load() for image in images])
        inputs["pixel_values"] = torch.from_numpy(pixels).to(device)
        inputs["image_grid_thw"] = torch.tensor([image.grid for image in images], device=device)
    output = model(**inputs, cache=cache, use_cache=True, logits_to_keep=1)
    logits: Tensor = output.logits[:, -1]
    return logits


def _images(example: Example, start: int, end: int) -> Iterator[Any]:
    return (image for image in example.images if start <= image.start < end)


def _fork(cache: DynamicCache, copies: int) -> DynamicCache:
    """`copies` branches of a cache of batch size 1. (`batch_repeat_interleave` knows no recurrent states.)"""
    forked = copy.deepcopy(cache)
    forked.reorder_cache(torch.zeros(copies, dtype=torch.int64))
    return forked
