"""Where answers stand in what a chat template writes: the last one, or all of them, with tool calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.errors import UserError
from configs.schema import PackConfig
from prefix_train import tiny
from prefix_train.chat import parse
from prefix_train.collate import collate, entry_weights
from prefix_train.plan import plan_epoch
from prefix_train.render import Example, Renderer
from prefix_train.tree import build_forest
from tests import chats
from tests.chats import picture, row, text

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def call(city: Any = "Bern", name: str = "weather", **more: Any) -> dict[str, Any]:
    """An assistant's turn that calls a function."""
    function = {"name": name, "arguments": {"city": city, "days": 2, "detailed": True}}
    return {"role": "assistant", "tool_calls": [{"type": "function", "id": "c1", "function": function}], **more}


def called_with(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def turns(*answers: str) -> list[dict[str, Any]]:
    return [turn for n, answer in enumerate(answers) for turn in row(f"Question {n}?", answer)["messages"]]


def text_renderer(template: str | None = None, targets: Any = "all") -> tuple[Renderer, Any]:
    tokenizer = tiny.build_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return Renderer(tokenizer, chats.text_config(), targets=targets), tokenizer


def runs(tokenizer: Any, example: Example) -> list[str]:
    """The text of each run of target tokens."""
    edges = np.flatnonzero(np.diff(example.target, prepend=False, append=False)).tolist()
    return [tokenizer.decode(example.ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


CONVERSATIONS = {
    "three answers": {"messages": [{"role": "system", "content": "Be brief."}, *turns("One.", "Two é.", "Three 🎉")]},
    "a call, its result, an answer": {
        "tools": [WEATHER],
        "messages": [
            *turns("Hello.")[:2],
            {"role": "user", "content": "And the weather?"},
            call(),
            {"role": "tool", "name": "weather", "content": '{"t": 7}'},
            {"role": "assistant", "content": "7 degrees."},
        ],
    },
    "it ends with a call, after a word": {
        "tools": [WEATHER],
        "messages": [*turns("Hello."), {"role": "user", "content": "Zürich?"}, call("Zürich", content="Let me see.")],
    },
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_all_answers_are_those_that_each_would_be_as_the_last(name: str, tmp_path: Path) -> None:
    """Against transformers' ids of the whole, and against a row for each answer, which trains the last one alone."""
    record = CONVERSATIONS[name]
    every, tokenizer = text_renderer(chats.TOOLS)
    last, _ = text_renderer(chats.TOOLS, "last")
    example = every.render(record, "d.jsonl:1", tmp_path)
    ids = tokenizer.apply_chat_template(record["messages"], tools=record.get("tools"), return_dict=False)
    assert example.ids.tolist() == ids
    expected = np.zeros(len(ids), bool)
    count = 0
    for index, message in enumerate(record["messages"]):
        if message["role"] == "assistant":
            count += 1
            short = last.render({**record, "messages": record["messages"][: index + 1]}, "d.jsonl:1", tmp_path)
            assert short.ids[:-1].tolist() == ids[: len(short.ids) - 1]
            expected[: len(short.ids)] |= short.target
            prompt = tokenizer.apply_chat_template(
                record["messages"][:index], tools=record.get("tools"), add_generation_prompt=True, tokenize=False
            )
            before = tokenizer.decode(short.ids[: short.prompt_length])
            assert prompt.rstrip() == before.rstrip()
    assert np.array_equal(example.target, expected)
    assert len(runs(tokenizer, example)) == count > 1
    assert (example.answer, example.prompt_length) == (short.answer, short.prompt_length)


def test_what_is_learned_of_a_call_is_its_text_through_the_end_of_turn(tmp_path: Path) -> None:
    renderer, tokenizer = text_renderer(chats.TOOLS)
    example = renderer.render(CONVERSATIONS["a call, its result, an answer"], "d.jsonl:1", tmp_path)
    first, second, third = runs(tokenizer, example)
    assert (first, third) == ("Hello.<|im_end|>", "7 degrees.<|im_end|>")
    assert (second[:12], second[-22:]) == ("<tool_call>\n", "</tool_call><|im_end|>")


def test_answers_between_images_are_found(tmp_path: Path) -> None:
    for number in range(3):
        chats.draw(tmp_path / f"{number}.png", 32 + 16 * number, seed=number)
    processor = chats.processor()
    renderer = Renderer(processor, chats.config(), targets="all")
    messages = [
        turn for n in range(3) for turn in row([picture(f"{n}.png"), text("Which?")], f"Number {n}.")["messages"]
    ]
    example = renderer.render({"messages": messages}, "d.jsonl:1", tmp_path)
    assert runs(processor.tokenizer, example) == [f"Number {n}.<|im_end|>" for n in range(3)]


@pytest.mark.parametrize("template", [chats.THINKING], ids=["thinking"])
def test_a_template_that_writes_the_last_answer_unlike_earlier_ones_is_refused_by_name(
    template: str, tmp_path: Path
) -> None:
    processor = chats.processor(template)
    processor.tokenizer.name_or_path = "models/thinker"
    renderer = Renderer(processor, chats.config(), targets="all")
    assert renderer.render(row(), "d.jsonl:1", tmp_path).target.any()
    with pytest.raises(
        UserError, match=r"^d.jsonl:2: the chat template of models/thinker writes messages\[1\] unlike an answer"
    ):
        renderer.render({"messages": turns("One.", "Two.")}, "d.jsonl:2", tmp_path)


def test_images_may_stand_under_image_url() -> None:
    def asked(**part: Any) -> dict[str, Any]:
        content = [{"type": "image_url", **part}, {"type": "text", "text": "Which?"}]
        return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "37"}]}

    for given in ("scans/1.png", {"url": "scans/1.png"}, {"url": "scans/1.png", "detail": "low"}):
        assert parse(asked(image_url=given), "d.jsonl:1").images == ["scans/1.png"]
    for part, complaint in (
        ({}, r"content\[0\].image_url is null; write a text"),
        ({"image_url": {"uri": "a"}}, "image_url has the unknown key 'uri'; known are url, detail"),
        ({"image_url": "a", "image": "b"}, "unknown key 'image'; did you mean image_url"),
    ):
        with pytest.raises(UserError, match=f"^d.jsonl:1: messages.*{complaint}"):
            parse(asked(**part), "d.jsonl:1")


def test_arguments_may_be_the_text_of_their_object() -> None:
    """As OpenAI's interface writes them."""
    asked = {"role": "user", "content": "Which?"}
    whole = [{"messages": [asked, called_with(given)]} for given in ({"mark": 37}, ' {"mark":37}')]
    mine, theirs = (parse(record, "d.jsonl:1") for record in whole)
    assert mine == theirs
    assert mine.messages[-1].calls == [{"name": "f", "arguments": {"mark": 37}}]
    assert whole[1]["messages"][1] == called_with(' {"mark":37}'), "the row itself is left alone"


@pytest.mark.parametrize(
    ("messages", "more", "complaint"),
    [
        (
            [*turns("One."), *turns("")[:1], call(city="<|im_end|>")],
            {},
            r"messages\[3\] holds '<\|im_end\|>', a control",
        ),
        ([*turns("One.")[:1], call(city="a\0b")], {}, r"messages\[1\].tool_calls\[0\] holds a NUL"),
        ([*turns("One.")[:1], {"role": "assistant", "tool_calls": {}}], {}, r"messages\[1\].tool_calls is an object"),
        ([*turns("One.")[:1], {"role": "assistant", "tool_calls": [{}]}], {}, r"tool_calls\[0\] names no function"),
        (
            [
                *turns("One.")[:1],
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1'}}]},
            ],
            {},
            r"arguments is no text of a JSON object: Expecting ',' delimiter",
        ),
        ([*turns("One.")[:1], called_with('{"a": 1, "a": 2}')], {}, "'a' stands twice in one object"),
        ([*turns("One.")[:1], called_with("[1]")], {}, "arguments is a list; write an object, or one as text"),
        ([*turns("One.")[:1], called_with('{"a": NaN}')], {}, "NaN is no JSON value"),
        ([*turns("One.")[:1], called_with("[" * 99_999)], {}, "arguments is nested too deeply"),
        ([*turns("One.")[:1], called_with('{"a": "\\u0000"}')], {}, "holds a NUL"),
        ([{"role": "user", "content": "a", "tool_calls": []}, *turns("b")], {}, "unknown key 'tool_calls'"),
        (turns("One."), {"tools": {"name": "f"}}, "tools is no list of objects"),
        (turns("One."), {"tools": [{"name": "<|im_end|>"}]}, r"tools hold '<\|im_end\|>', a control token"),
        ([*turns("", "Two.")], {}, r"messages\[1\]: the target is empty"),
    ],
)
def test_bad_calls_and_tools_are_one_line(messages: Any, more: Any, complaint: str, tmp_path: Path) -> None:
    renderer, _ = text_renderer(chats.TOOLS)
    with pytest.raises(UserError, match=complaint) as caught:
        renderer.render({"messages": messages, **more}, "d.jsonl:7", tmp_path)
    assert str(caught.value).startswith("d.jsonl:7: ")
    assert "\n" not in str(caught.value)


def test_a_template_that_knows_no_calls_or_no_tools_is_refused(tmp_path: Path) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content }}<|im_end|>\n{% endfor %}"
    renderer, _ = text_renderer(plain)
    with pytest.raises(UserError, match=r"^x: the chat template drops or changes a tool call of messages\[1\]"):
        renderer.render({"messages": [*turns("")[:1], call(content="Wait.")]}, "x", tmp_path)
    with pytest.raises(UserError, match=r"^x: the chat template drops the tool 'weather'"):
        renderer.render({"messages": turns("One."), "tools": [WEATHER]}, "x", tmp_path)


def test_several_questions_about_one_item_are_a_tree_of_depth_three(tmp_path: Path) -> None:
    """Instructions, an item of two targets each: what is shared is found by itself, at both depths."""
    rules = " ".join(f"Rule {number}: look twice." for number in range(20))
    renderer, _ = text_renderer(targets="last")
    items = [" ".join(f"{item}{word}" for word in range(20)) for item in "ab"]
    records = [row(f"{item} What is its {what}?", f"A {what}.", rules) for item in items for what in ("size", "colour")]
    examples = [renderer.render(record, f"d:{n}", tmp_path) for n, record in enumerate(records)]
    forest = build_forest([example.keys for example in examples], 16)
    plan = plan_epoch(forest.lengths, forest, PackConfig(max_positions=4096, packs_per_update=1), 1, 0, 0)
    (pack,) = plan.packs
    assert max(len(path) for path in pack.paths) == 3
    assert pack.positions < 0.5 * pack.logical


def test_conversations_that_share_a_learned_answer_weigh_it_as_apart(tmp_path: Path) -> None:
    """With all answers the first one lies in the shared segment: its tokens carry both examples' weights."""
    renderer, _ = text_renderer()
    records = [{"messages": turns("A long first answer that both share.", own)} for own in ("Yes.", "No, never.")]
    examples = [renderer.render(record, f"d:{n}", tmp_path) for n, record in enumerate(records)]
    forest = build_forest([example.keys for example in examples], 4)
    plan = plan_epoch(forest.lengths, forest, PackConfig(max_positions=4096, packs_per_update=1, min_shared=4), 1, 0, 0)
    (pack,) = plan.packs
    assert len(pack.lengths) == 3
    counts = [int(example.target.sum()) for example in examples]
    targets = collate(pack, examples, entry_weights("example", counts)).targets
    shared = int(examples[0].target[: pack.lengths[0]].sum())
    assert shared > 4
    assert len(targets.ids) == sum(counts) - shared
    assert sorted(targets.weights.tolist()) == pytest.approx(
        sorted(
            [0.5 / counts[0] + 0.5 / counts[1]] * shared
            + [0.5 / counts[0]] * (counts[0] - shared)
            + [0.5 / counts[1]] * (counts[1] - shared)
        )
    )
