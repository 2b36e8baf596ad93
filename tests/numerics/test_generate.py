"""Greedy answers with the prefix computed once equal transformers' plain `generate`, token for token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from prefix_train import digits, generate, tiny
from prefix_train.data import Examples, load_examples
from prefix_train.render import Example, Renderer
from prefix_train.tree import build_forest
from tests import models, support
from tests.tiny_text import BUILD as TEXT
from tests.tiny_vision import BUILD

NEW = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    digits.write_digits(folder)
    return folder


def random_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Large enough that answers differ from each other and no state decays at once."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if name.endswith("A_log"):
                parameter.fill_(-3.0)
    return model.eval()


def positions(examples: Sequence[Example]) -> int:
    """Tokens of the prompts' forest: each shared beginning once."""
    return int(build_forest([example.keys[: example.prompt_length] for example in examples], 16).length.sum())


def deep_rows(folder: Path) -> Path:
    """Two instructions, two documents under each, three questions about each; a second turn; one prompt twice."""
    rows = []
    for instruction in range(2):
        rule = f"Instruction {instruction}: " + f"read rule {instruction} and answer in one word. " * 6
        for document in range(2):
            text = f"Document {document}: " + f"the harbour of town {document} froze over. " * 5
            long = "Where did all this happen, to whom, and who has seen it with eyes of their own, or heard of it?"
            for question in (long, "When did it happen?", "How cold was it?"):
                asked = [{"role": "system", "content": rule}, {"role": "user", "content": f"{text}{question}"}]
                rows.append([*asked, {"role": "assistant", "content": "In town."}])
    again = [*rows[0], {"role": "user", "content": "And then?"}, {"role": "assistant", "content": "It thawed."}]
    rows += [again, [*rows[1][:-1], {"role": "assistant", "content": "Last winter."}]]
    path = folder / "deep.jsonl"
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    return path


def test_every_shared_beginning_of_a_deep_tree_is_computed_once(tmp_path: Path) -> None:
    model = random_weights(tiny.build_model(TEXT, 0))
    examples = load_examples(deep_rows(tmp_path), Renderer(tiny.build_processor(model.config), model.config), 4096)
    forest = build_forest([example.keys[: example.prompt_length] for example in examples], 16)
    assert max(len(forest.path(example)) for example in range(len(forest))) >= 3
    assert len(set(forest.last.tolist())) == len(examples) - 1, "one prompt stands there twice"
    assert set(forest.last.tolist()) & set(forest.parent.tolist()), "one prompt begins another"
    expected = [support.plain(model, example, NEW) for example in examples]
    for cache_tokens in (1, 1 << 18):
        answers, counts = generate.greedy(model, examples, NEW, [], cache_tokens=cache_tokens)
        assert answers == expected
        assert counts.prompt == forest.length.sum() < counts.logical / 3
        assert counts.answers == NEW * (len(examples) - 1)


def by_hand(sequences: Sequence[Sequence[int]], coordinates: int) -> list[Example]:
    """Prompts of these tokens, without a tokenizer; the last token stands for the answer."""
    found = []
    for number, tokens in enumerate(sequences):
        ids = np.array(tokens, dtype=np.int64)
        positions = np.broadcast_to(np.arange(len(ids)), (coordinates, len(ids)))
        target = np.arange(len(ids)) == len(ids) - 1
        found.append(Example(str(number), f"by hand:{number}", ids, ids, positions, target, (), "", len(ids) - 1))
    return found


@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_every_family(family: str) -> None:
    """A tree of depth 3 with branches of one length and of several, and a prompt that begins another."""
    model = models.build(family).eval()
    draw = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return draw.integers(1, 80, count).tolist()

    sequences = []
    for _ in range(2):
        top = tokens(40)
        for _ in range(2):
            middle = [*top, *tokens(21)]
            sequences += [[*middle, *tokens(length)] for length in (3, 3, 9)]
            sequences.append([*sequences[-1][:-1], *tokens(30)])
        sequences.append([*top, 5])
    coordinates = 3 if hasattr(model.model, "get_rope_index") else 1
    examples = by_hand(sequences, coordinates)
    expected = [support.plain(model, example, NEW) for example in examples]
    answers, counts = generate.greedy(model, examples, NEW, [])
    assert answers == expected
    assert counts.prompt == positions(examples) < counts.logical / 2
    assert len({tuple(answer) for answer in expected}) > len(examples) // 2, "answers depend on the prompts"


def test_no_prompt_no_answer() -> None:
    model = random_weights(tiny.build_model(TEXT, 0))
    assert generate.greedy(model, [], NEW, []) == ([], generate.Counts())


def some_of_each(folder: Path, renderer: Renderer) -> Examples:
    found = load_examples(folder / "heldout.jsonl", renderer, 8192)
    by_length: dict[int, list[Example]] = {}
    for example in found:
        by_length.setdefault(example.prompt_length, []).append(example)
    assert len(by_length) >= 2, "two instruction sets"
    return Examples([example for alike in by_length.values() for example in alike[:4]])


def test_images_in_prefix_and_item(folder: Path) -> None:
    model = random_weights(tiny.build_model(BUILD, 0))
    renderer = Renderer(tiny.build_processor(model.config), model.config)
    examples = some_of_each(folder, renderer)
    assert any(len(example.images) > 1 for example in examples), "a prefix that contains an image"
    ends = [int(token) for token in support.plain(model, examples[0], NEW)[5:6]]
    expected = [support.plain(model, example, NEW, ends) for example in examples]
    answers, counts = generate.greedy(model, examples, NEW, ends)
    assert answers == expected
    assert counts.prompt == positions(examples) < counts.logical / 3
    assert counts.logical == sum(example.prompt_length for example in examples)
    assert len({tuple(answer) for answer in expected}) > len(examples) // 2, "answers depend on the items"
    assert len(expected[0]) < NEW, "an end token ends an answer early"


def test_without_the_prefix_the_answers_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_weights(tiny.build_model(BUILD, 0))
    examples = some_of_each(folder, Renderer(tiny.build_processor(model.config), model.config))
    right, _ = generate.greedy(model, examples, NEW, [])
    fork = generate._fork

    def forget_recurrent_state(cache: Any, copies: int) -> Any:
        forked = fork(cache, copies)
        for layer in forked.layers:
            if hasattr(layer, "recurrent_states"):
                layer.recurrent_states[0].zero_()
        return forked

    monkeypatch.setattr(generate, "_fork", forget_recurrent_state)
    assert generate.greedy(model, examples, NEW, [])[0] != right
