"""Rendering: the ids of the whole conversation alone, the target in them, images, keys and position ids."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import AddedToken
from transformers import AutoModelForImageTextToText, LlamaConfig

from configs.errors import UserError
from prefix_train import tiny
from prefix_train.render import Example, PositionIndex, Renderer
from prefix_train.tokens import Tokens
from tests import chats
from tests.chats import picture, row, text

PARTS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<|image_pad|>", "<think>", "\n", "\n\n", " ", "  a", "é", "ﬀ日"]),
)


def whole(processor: Any, record: dict[str, Any], folder: Path) -> dict[str, NDArray[Any]]:
    """What the processor in one piece makes of the messages, images opened by transformers from their paths."""
    messages = json.loads(json.dumps(record["messages"]))
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else []:
            if part["type"] == "image":
                part["image"] = str(folder / part["image"])
    return dict(processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="np"))


def target_text(processor: Any, example: Example) -> str:
    return str(processor.tokenizer.decode(example.ids[example.target]))


def random_row(draw: random.Random) -> dict[str, Any]:
    words = ["the", "digit", " seven", "\n", "  ", "é", "日本", "🎉", "{}", '"', "a\tb", "<think>", "1234", "ﬀ", "'s"]

    def content(images: bool) -> Any:
        if draw.random() < 0.4:
            return "x" + "".join(draw.choices(words, k=draw.randint(0, 9)))
        parts = [text("y" + "".join(draw.choices(words, k=draw.randint(0, 5)))) for _ in range(draw.randint(1, 3))]
        if images:
            for _ in range(draw.randint(0, 2)):
                parts.insert(draw.randint(0, len(parts)), picture(f"{draw.randint(0, 2)}.png"))
        return parts

    messages = [{"role": "system", "content": content(False)}] if draw.random() < 0.7 else []
    for _ in range(draw.randint(1, 3)):
        messages += [{"role": "user", "content": content(True)}, {"role": "assistant", "content": content(False)}]
    return {"messages": messages}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("images")
    for index, size in enumerate([(32, 32), (48, 80), (17, 45)]):
        chats.draw(made / f"{index}.png", *size, seed=index)
    return made


@pytest.mark.parametrize("template", [None, chats.THINKING], ids=["demonstration", "thinking"])
def test_everything_is_what_the_processor_makes_of_the_whole_conversation(template: str | None, folder: Path) -> None:
    processor = chats.processor(template)
    renderer = Renderer(processor, chats.config())
    draw = random.Random(5)
    with_images = 0
    for _ in range(60):
        record = random_row(draw)
        expected = whole(processor, record, folder)
        example = renderer.render(record, "d.jsonl:1", folder)
        assert np.array_equal(example.ids, expected["input_ids"][0])
        assert len(example.ids) == len(example.keys) == len(example.target) == example.position_ids.shape[1]
        if example.images:
            with_images += 1
            assert np.array_equal(np.concatenate([image.load() for image in example.images]), expected["pixel_values"])
            assert [image.grid for image in example.images] == [tuple(g) for g in expected["image_grid_thw"].tolist()]
    assert with_images > 10


def test_text_models_get_what_their_tokenizer_makes_of_the_joined_text(folder: Path) -> None:
    renderer, tokenizer = chats.text_renderer(), tiny.build_tokenizer()
    for answer in ("A seven.", [text("A "), text("seven.")]):
        example = renderer.render(row(answer=answer), "d.jsonl:1", folder)
        assert example.ids.tolist() == tokenizer.apply_chat_template(row()["messages"], return_dict=False)
        assert example.position_ids.tolist() == [list(range(len(example.ids)))]
        assert example.answer == "A seven."
    with pytest.raises(UserError, match=r"^d.jsonl:1: image '0.png': this model reads text only"):
        renderer.render(row([picture("0.png")]), "d.jsonl:1", folder)


@given(st.lists(PARTS, max_size=12).map("".join))
def test_pieces_have_the_tokens_of_the_whole(joined: str) -> None:
    tokens = chats.renderer()._tokens
    assert tokens.by_pieces
    fast, slow = tokens(joined, add_special_tokens=True), tokens._whole(joined, add_special_tokens=True)
    assert np.array_equal(fast[0], slow[0])
    assert np.array_equal(fast[1], slow[1])


def test_a_tokenizer_that_looks_across_control_tokens_is_read_whole() -> None:
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_tokens([AddedToken("<|greedy|>", special=True, lstrip=True)], special_tokens=True)
    tokens = Tokens(tokenizer)
    joined = "seven   <|greedy|>"
    assert not tokens.by_pieces
    right = tokens(joined, add_special_tokens=False)[0]
    assert np.array_equal(right, tokens._whole(joined, add_special_tokens=False)[0])
    tokens.by_pieces = True
    assert not np.array_equal(right, tokens(joined, add_special_tokens=False)[0])


def test_the_target_is_the_last_answer_through_its_end_of_turn_token(folder: Path) -> None:
    processor = chats.processor()
    record = row([picture("0.png"), text("?")], 'é{"a": 7} 🎉', system="Be brief.")
    record["messages"][1:1] = row("First?", "First answer.")["messages"]
    example = chats.renderer().render(record, "d.jsonl:1", folder)
    assert target_text(processor, example) == 'é{"a": 7} 🎉<|im_end|>'
    assert example.answer == 'é{"a": 7} 🎉'
    assert example.prompt_length == int(np.flatnonzero(example.target)[0])
    assert np.flatnonzero(example.target).tolist() == list(range(example.prompt_length, len(example.ids) - 1))
    prompt = processor.apply_chat_template(record["messages"][:-1], add_generation_prompt=True)
    assert processor.tokenizer.decode(example.ids[: example.prompt_length]).replace("<|image_pad|>" * 4, "P") == (
        prompt.replace("<|image_pad|>", "P")
    )


def test_what_the_template_puts_before_the_answer_is_prompt(folder: Path) -> None:
    processor = chats.processor(chats.THINKING)
    renderer = Renderer(processor, chats.config())
    example = renderer.render(row(answer="  A seven.\n"), "d.jsonl:1", folder)
    assert target_text(processor, example) == "A seven.<|im_end|>"
    assert processor.tokenizer.decode(example.ids[: example.prompt_length]).endswith("<think>\n\n</think>\n\n")


def test_an_answer_that_holds_its_reasoning_is_trained_from_the_generation_prompt_on(folder: Path) -> None:
    processor = chats.processor(chats.THINKING)
    renderer = Renderer(processor, chats.config())
    example = renderer.render(row(answer="<think>\nOne stroke.\n</think>\n\nA seven."), "d.jsonl:1", folder)
    assert target_text(processor, example) == "One stroke.\n</think>\n\nA seven.<|im_end|>"
    assert processor.tokenizer.decode(example.ids[: example.prompt_length]).endswith("assistant\n<think>\n")


@pytest.mark.parametrize(
    ("template", "answer", "target"),
    [
        pytest.param(chats.SPACED, "and so on", " and so on<|im_end|>", id="space"),
        pytest.param(chats.GLUED, "\nbreak", "\n\nbreak<|im_end|>", id="line break"),
        pytest.param(chats.GLUED, "plain", "plain<|im_end|>", id="no token across"),
    ],
)
def test_a_token_across_the_start_of_the_answer_belongs_to_the_target(
    template: str, answer: str, target: str, folder: Path
) -> None:
    """In the first two the prompt's own ids are no prefix of the example's."""
    renderer, tokenizer = chats.text_renderer(template), tiny.build_tokenizer()
    tokenizer.chat_template = template
    record = row(answer=answer)
    example = renderer.render(record, "d.jsonl:1", folder)
    assert example.ids.tolist() == tokenizer.apply_chat_template(record["messages"], return_dict=False)
    assert tokenizer.decode(example.ids[example.target]) == target


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        pytest.param("{{ messages[0].content }}", "cannot tell where the answer begins", id="answer left out"),
        pytest.param(
            "{% for m in messages %}<|im_start|>{{ m.content | upper }}<|im_end|>{% endfor %}",
            "cannot tell where the answer begins",
            id="answer changed beyond recognition",
        ),
        pytest.param(
            "{% for m in messages %}<|im_start|>{{ m.content | replace('seven', '7') }}<|im_end|>{% endfor %}",
            "drops or changes the text of the answer",
            id="answer changed",
        ),
        pytest.param(
            "{% for m in messages if m.role == 'assistant' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
            r"drops or changes the text of messages\[0\]",
            id="question left out",
        ),
        pytest.param(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
            "without an end-of-turn token",
            id="no end of turn",
        ),
        pytest.param(
            "{% for m in messages %}{{ m.content }} over<|im_end|>{% endfor %}",
            "without an end-of-turn token",
            id="text before the end of turn",
        ),
        pytest.param("{{ raise_exception('No tea.') }}", "refuses the messages: No tea", id="refusal"),
    ],
)
def test_a_template_that_hides_the_target_is_an_error(template: str, complaint: str, folder: Path) -> None:
    with pytest.raises(UserError, match=f"^d.jsonl:7: .*{complaint}"):
        chats.text_renderer(template).render(row(), "d.jsonl:7", folder)


def test_nothing_before_the_answer_is_an_error(folder: Path) -> None:
    record = {"messages": [{"role": "assistant", "content": "A seven."}]}
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(UserError, match=r"^d.jsonl:1: "):
        chats.text_renderer(template).render(record, "d.jsonl:1", folder)


@pytest.mark.parametrize(
    "content",
    [
        "stop<|im_end|>go",
        "<|image_pad|>",
        [text("<|video"), text("_pad|>")],
        [text("see"), text("<|vision_start|>")],
    ],
)
def test_control_tokens_in_a_text_are_an_error(content: Any, folder: Path) -> None:
    with pytest.raises(UserError, match=r"^d.jsonl:1: messages\[0\] holds '<\|\w+\|>', a control token"):
        chats.renderer().render(row(content), "d.jsonl:1", folder)
    with pytest.raises(UserError, match=r"^d.jsonl:1: messages\[1\] holds"):
        chats.renderer().render(row(answer=content), "d.jsonl:1", folder)


def test_halves_of_a_control_token_around_an_image_are_harmless(folder: Path) -> None:
    record = row([text("<|im_"), picture("0.png"), text("end|>")])
    expected = whole(chats.processor(), record, folder)["input_ids"][0]
    assert np.array_equal(chats.renderer().render(record, "d.jsonl:1", folder).ids, expected)


def test_images_in_a_system_message_are_refused_by_the_template(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"^d.jsonl:1: the chat template refuses .*System message cannot contain images"
    ):
        chats.renderer().render(row(system=[picture("0.png"), text("Rules.")]), "d.jsonl:1", folder)


def test_keys_tell_images_apart_by_their_pixels_and_nothing_else_from_the_ids(folder: Path) -> None:
    chats.draw(folder / "copy.png", 32, 32, seed=0)
    chats.draw(folder / "other.png", 32, 32, seed=9)
    render = chats.renderer().render
    first, copy, other = (
        render(row([picture(name), text("?")]), "d.jsonl:1", folder) for name in ("0.png", "copy.png", "other.png")
    )
    image = first.images[0]
    inside = slice(image.start, image.start + image.length)
    assert np.array_equal(first.ids, other.ids)
    assert np.array_equal(first.keys, copy.keys)
    assert (first.keys[inside] < 0).all()
    assert len(set(first.keys[inside].tolist())) == 1
    assert (first.keys[inside] != other.keys[inside]).all()
    outside = np.delete(np.arange(len(first.ids)), np.arange(len(first.ids))[inside])
    assert np.array_equal(first.keys[outside], first.ids[outside])
    assert first.keys.min() >= -(1 << 62)


def test_a_processor_that_does_more_than_expected_is_refused(folder: Path) -> None:
    class Doubling(tiny.Qwen3VLProcessor):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            out = super().__call__(*args, **kwargs)
            if kwargs.get("images"):
                out["pixel_values"] = np.asarray(out["pixel_values"]) * 2
            return out

    stock = chats.processor()
    renderer = Renderer(Doubling(stock.image_processor, stock.tokenizer, stock.chat_template), chats.config())
    renderer.render(row(), "d.jsonl:1", folder)
    with pytest.raises(UserError, match=r"Doubling renders d\.jsonl:2 in a way that is not supported"):
        renderer.render(row([picture("0.png")]), "d.jsonl:2", folder)


def test_a_processor_that_does_not_fit_the_model_is_refused() -> None:
    wrong_token = tiny.build_config({**chats.BUILD})
    wrong_token.image_token_id = 5
    with pytest.raises(UserError, match="but the model's image_token_id is 5"):
        Renderer(chats.processor(), wrong_token)
    wrong_merge = chats.processor()
    wrong_merge.image_processor.merge_size = 4
    with pytest.raises(UserError, match="merges 4 x 4 patches, but the model 2 x 2"):
        Renderer(wrong_merge, chats.config())
    bare = tiny.build_tokenizer()
    bare.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        Renderer(bare, LlamaConfig())


def test_a_tokenizer_with_more_tokens_than_the_model_is_an_error(folder: Path) -> None:
    tokenizer = tiny.build_tokenizer()
    most = max(tokenizer("<|im_start|><|im_end|>").input_ids)
    Renderer(tokenizer, LlamaConfig(vocab_size=most + 1)).render(row(), "d.jsonl:1", folder)
    with pytest.raises(
        UserError, match=rf"^d.jsonl:1: the tokenizer writes token {most}, and the model knows {most:,}"
    ):
        Renderer(tokenizer, LlamaConfig(vocab_size=most)).render(row(), "d.jsonl:1", folder)


def test_the_fingerprint_changes_with_what_decides_the_rendering() -> None:
    def fingerprint(change: Any = None) -> str:
        processor = chats.processor()
        if change:
            change(processor)
        return Renderer(processor, chats.config()).fingerprint

    stock = fingerprint()
    chats.renderer().render(row(), "d.jsonl:1", Path())
    assert stock == fingerprint() == chats.renderer().fingerprint
    assert stock != fingerprint(lambda p: setattr(p, "chat_template", chats.THINKING))
    assert stock != fingerprint(lambda p: setattr(p.image_processor, "image_mean", [0.4] * 3))
    assert stock != fingerprint(lambda p: p.tokenizer.add_tokens(["newword"]))


@pytest.fixture(scope="module")
def model() -> Any:
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(chats.config()).model


def by_the_model(model: Any, example: Example) -> NDArray[np.int64]:
    """Position ids [3, L] by the whole model's index function."""
    ids = torch.tensor(example.ids)[None]
    kinds = (ids == chats.config().image_token_id).int()
    grids = torch.tensor([image.grid for image in example.images]) if example.images else None
    return np.asarray(model.get_rope_index(ids, kinds, image_grid_thw=grids)[0][:, 0])


def check_positions(model: Any, example: Example) -> None:
    """Every token's position ids are the model's own; the text after an image goes on after its largest coordinate."""
    expected = by_the_model(model, example)
    assert np.array_equal(example.position_ids, expected)
    for image in example.images:
        end = image.start + image.length
        assert (example.position_ids[:, end] == expected[:, :end].max() + 1).all()


def test_positions_of_standalone_examples_are_the_model_s(model: Any, folder: Path) -> None:
    draw = random.Random(7)
    for _ in range(30):
        check_positions(model, chats.renderer().render(random_row(draw), "d.jsonl:1", folder))


def test_positions_are_the_same_whatever_the_default_device(folder: Path) -> None:
    record = row([text("Look: "), picture("0.png"), text("What is it?")])
    expected = chats.renderer().render(record, "d.jsonl:1", folder)
    with torch.device("meta"):
        example = chats.renderer().render(record, "d.jsonl:1", folder)
    assert len(example.images) == 1
    assert np.array_equal(example.position_ids, expected.position_ids)


def test_r07_text_goes_on_after_the_largest_coordinate_of_the_image(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image of 14 x 20 merged tokens takes 280 positions and advances the cursor by 20."""
    chats.draw(tmp_path / "wide.png", 20 * 16, 14 * 16)
    record = row([text("Look: "), picture("wide.png"), text("What is it?")])
    example = chats.renderer().render(record, "d.jsonl:1", tmp_path)
    (image,) = example.images
    before, after = example.position_ids[:, image.start - 1], example.position_ids[:, image.start + image.length]
    assert image.length == 280
    assert (after - before == 20 + 1).all()
    check_positions(model, example)
    counted = lambda index, ids, grids: np.broadcast_to(np.arange(len(ids)), (3, len(ids))).copy()  # noqa: E731
    monkeypatch.setattr(PositionIndex, "__call__", counted)
    with pytest.raises(AssertionError):
        check_positions(model, chats.renderer().render(record, "d.jsonl:1", tmp_path))


def test_2000_examples_with_the_same_instructions_render_in_seconds(folder: Path) -> None:
    """By tokens read, not by the clock: the instructions are tokenized once."""
    system = " ".join(f"Rule {index}: look twice." for index in range(150))
    renderer = Renderer(chats.processor(), chats.config())
    for index in range(2000):
        example = renderer.render(row(f"Which is {index}?", system=system), f"d.jsonl:{index}", folder)
    assert len(example.ids) > 1500
    read = renderer._tokens._piece.cache_info()
    assert read.misses < 2000 + 20


def test_images_are_read_only_and_upright(tmp_path: Path) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.fromarray(np.arange(32 * 64 * 3, dtype=np.uint8).reshape(32, 64, 3)).save(tmp_path / "a.png", exif=exif)
    example = chats.renderer().render(row([picture("a.png")]), "d.jsonl:1", tmp_path)
    assert example.images[0].grid == (1, 8, 4)
    for array in (example.ids, example.keys, example.position_ids, example.target, example.images[0].pixels):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
