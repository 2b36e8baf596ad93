"""Greedy answers with each shared beginning computed once, on transformers' own unpatched model and cache.

L tokens of a prompt, B prompts that are answered together. The prompts' forest is walked from its roots: a node's
tokens run once, behind the cache of what is above it (keys and values, convolution and recurrent states), and that
cache is copied for what branches off. Nodes that nothing branches off and that are equally long run as one batch, so
that no padding ever enters a recurrent state. Equal prompts are answered once.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from prefix_train.render import Example
from prefix_train.tree import build_forest


@dataclass
class Counts:
    """Tokens that went through the model. prompt: once where prompts share them. logical: of all prompts alone.

    answers: generated ones, of equal prompts once.
    """

    prompt: int = 0
    logical: int = 0
    answers: int = 0


@torch.no_grad()
def greedy(
    model: PreTrainedModel,
    examples: Sequence[Example],
    max_new_tokens: int,
    end_tokens: Sequence[int],
    *,
    min_shared: int = 16,
    cache_tokens: int = 1 << 18,
) -> tuple[list[list[int]], Counts]:
    """Answer each example's prompt; a list of token ids per example, its end token included where it came.

    model: unpatched; it is left in its own train or eval mode, so dropout must be off. Stops an answer at any of
    `end_tokens` or after `max_new_tokens`. cache_tokens: most tokens that the caches of answers in one batch may hold;
    a single answer may hold more. Equal to `model.generate(do_sample=False)` token for token.
    """
    same: dict[bytes, list[int]] = defaultdict(list)
    counts = Counts()
    for index, example in enumerate(examples):
        same[example.keys[: example.prompt_length].tobytes()].append(index)
        counts.logical += example.prompt_length
    prompts = [examples[indices[0]] for indices in same.values()]
    walk = _Walk(model, prompts, max_new_tokens, end_tokens, cache_tokens, counts)
    walk.all(min_shared)
    answers: list[list[int]] = [[] for _ in examples]
    for answer, indices in zip(walk.answers, same.values(), strict=True):
        for index in indices:
            answers[index] = answer
    return answers, counts


class _Walk:
    """The way through the forest of `prompts`, no two of which are equal; `answers` fills on it."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Example],
        max_new_tokens: int,
        end_tokens: Sequence[int],
        cache_tokens: int,
        counts: Counts,
    ) -> None:
        self.model, self.prompts, self.max_new_tokens = model, prompts, max_new_tokens
        self.ends = torch.tensor(list(end_tokens), device=model.device)
        self.cache_tokens, self.counts = cache_tokens, counts
        self.answers: list[list[int]] = [[] for _ in prompts]

    def all(self, min_shared: int) -> None:
        """Answer every prompt."""
        if not self.prompts:
            return
        forest = build_forest((prompt.keys[: prompt.prompt_length] for prompt in self.prompts), min_shared)
        self.spans = list(zip(forest.start.tolist(), forest.end.tolist(), strict=True))
        self.source = forest.source.tolist()
        self.below: dict[int, list[int]] = defaultdict(list)
        for node, parent in enumerate(forest.parent.tolist()):
            self.below[parent].append(node)
        self.ending = {node: prompt for prompt, node in enumerate(forest.last.tolist())}
        # A stack of nodes, each with what makes its cache: a chain of turns may be deeper than Python's own.
        stack: list[tuple[int, Callable[[], DynamicCache]]] = [(-1, self._empty)]
        while stack:
            node, take = stack.pop()
            stack += self._visit(node, take())

    def _empty(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def _visit(self, node: int, cache: DynamicCache) -> list[tuple[int, Callable[[], DynamicCache]]]:
        """Run `node` behind `cache`, answer what ends with it or with a leaf below; the other nodes below."""
        if node >= 0:
            start, end = self.spans[node]
            logits = self._forward([self.prompts[self.source[node]]], start, end, cache)
            if node in self.ending:
                answered = cache if node not in self.below else _fork(cache, 1)
                self._decode([self.ending[node]], logits, answered)
        inner = [child for child in self.below[node] if child in self.below]
        leaves: dict[int, list[int]] = defaultdict(list)
        for child in self.below[node]:
            if child not in self.below:
                leaves[self.spans[child][1]].append(child)
        for end, alike in sorted(leaves.items()):
            size = max(1, self.cache_tokens // (end + self.max_new_tokens))
            for at in range(0, len(alike), size):
                batch = [self.ending[child] for child in alike[at : at + size]]
                branches = self._empty() if node < 0 else _fork(cache, len(batch))
                start = self.spans[alike[0]][0]
                logits = self._forward([self.prompts[prompt] for prompt in batch], start, end, branches)
                self._decode(batch, logits, branches)
        # The last to be visited may have the cache itself: nothing needs it any more.
        take: list[Callable[[], DynamicCache]] = [lambda: _fork(cache, 1)] * len(inner)
        if node < 0:
            take = [self._empty] * len(inner)
        elif inner:
            take[0] = lambda: cache
        return list(zip(inner, take, strict=True))

    def _decode(self, batch: Sequence[int], logits: Tensor, cache: DynamicCache) -> None:
        """Answer the prompts `batch`, all in `cache`; logits [B, V] of their last tokens."""
        examples = [self.prompts[prompt] for prompt in batch]
        length = examples[0].prompt_length
        position = torch.tensor([int(e.position_ids[:, :length].max()) + 1 for e in examples], device=logits.device)
        done = torch.zeros(len(examples), dtype=torch.bool, device=logits.device)
        chosen: list[Tensor] = []
        live: list[Tensor] = []
        for step in range(self.max_new_tokens):
            token = logits.argmax(-1)
            chosen.append(token)
            live.append(~done)
            done |= torch.isin(token, self.ends)
            if bool(done.all()) or step + 1 == self.max_new_tokens:
                break
            ids = (position + step)[:, None]
            logits = self.model(
                input_ids=token[:, None],
                position_ids=ids.expand(3, -1, -1) if examples[0].position_ids.shape[0] == 3 else ids,
                cache=cache,
                use_cache=True,
            ).logits[:, -1]
        tokens, kept = torch.stack(chosen, 1).tolist(), torch.stack(live, 1).tolist()
        for prompt, row, rows in zip(batch, tokens, kept, strict=True):
            self.answers[prompt] = [token for token, keep in zip(row, rows, strict=True) if keep]
            self.counts.answers += len(self.answers[prompt])

    def _forward(self, examples: Sequence[Example], start: int, end: int, cache: DynamicCache) -> Tensor:
        """Run tokens [start, end) of every example behind `cache`, which grows; logits [B, V] of the last one."""
        device = self.model.device
        self.counts.prompt += len(examples) * (end - start)
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
        output = self.model(**inputs, cache=cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = output.logits[:, -1]
        return logits


def _images(example: Example, start: int, end: int) -> Iterator[Any]:
    return (image for image in example.images if start <= image.start < end)


def _fork(cache: DynamicCache, copies: int) -> DynamicCache:
    """`copies` branches of a cache of batch size 1. (`batch_repeat_interleave` knows no recurrent states.)"""
    forked = copy.deepcopy(cache)
    forked.reorder_cache(torch.zeros(copies, dtype=torch.int64))
    return forked
