"""Conversations that share beginnings in every way, rendered by the product and by transformers' processor alone.

Also the models that fit the demonstration's tokenizer, with the weights of `tests.models`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import PIL.Image
import torch
from transformers import PreTrainedModel

from prefix_train import tiny
from prefix_train.data import load_examples
from prefix_train.render import Example, Renderer
from tests import chats, models, oracle, tiny_vision
from tests.chats import picture, text

Images = Literal["neither", "prefix", "item", "both"]

SYSTEM = "Read the sign. Answer in one word, in small letters, and say nothing else."
OTHER = "Count what you see and add the digits."
EXAMPLE = "An example: this reads 'bus stop'. Now it is your turn."
QUESTIONS = ("Which shop?", "Which shop?", "Which street?", "Who may park here?", "When, and on which days?", "When?")
ANSWERS = ("bakery", "shoes", "mill lane", "nobody", "on sundays", "on sundays")

_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
BUILDS: dict[str, dict[str, Any]] = {
    "qwen3_5": tiny_vision.BUILD,
    "qwen3_5 for CUDA": {
        **tiny_vision.BUILD,
        "text_config": {
            **tiny_vision.BUILD["text_config"],
            "hidden_size": 128,
            "head_dim": 64,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        "vision_config": {**tiny_vision.BUILD["vision_config"], "out_hidden_size": 128},
    },
    "llama": {"model_type": "llama", **_SIZES, "intermediate_size": 40, "num_hidden_layers": 2},
    "qwen3_5_moe_text": {
        "model_type": "qwen3_5_moe_text",
        **{name: value for name, value in models._moe_text().items() if not name.endswith(("_id", "vocab_size"))},
    },
}


def build(family: str, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    """The model, in training mode, and its processor or tokenizer."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # in the float64 mode other numbers would be drawn
    try:
        model = tiny.build_model(BUILDS[family], 0)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            models.draw(model)
    finally:
        torch.set_default_dtype(default)
    return model.to(dtype).train(), tiny.build_processor(model.config)


def rows(images: Images, folder: Path) -> list[dict[str, Any]]:
    """Two instructions; what a first turn shares may hold an image, and so may what is each item's own.

    Among them: one that another continues, one twice, questions with two answers (so that the target starts a
    segment), and one image that is asked about twice.
    """
    shown = [picture("example.png"), text(EXAMPLE)] if images in ("prefix", "both") else [text(EXAMPLE)]
    chats.draw(folder / "example.png", 48, 32, seed=1)
    found = []
    for index, (question, answer) in enumerate(zip(QUESTIONS, ANSWERS, strict=True)):
        own = []
        if images in ("item", "both"):
            name = f"{index // 3}.png"
            chats.draw(folder / name, 32, (32, 64)[index // 3], seed=2 + index // 3)
            own = [picture(name)]
        found.append(chats.row([*shown, *own, text(question)], answer, system=SYSTEM))
    continued = chats.row([*shown, text(QUESTIONS[0])], ANSWERS[0], system=SYSTEM)
    continued["messages"] += chats.row("And next door?", "an inn")["messages"]
    twins = [chats.row([*shown, text("How many?")], answer, system=OTHER) for answer in ("four", "7", "four", "four")]
    stem = chats.row([*shown, text(QUESTIONS[0])], ANSWERS[0], system=SYSTEM)
    return [*found, stem, continued, *twins, chats.row("Hello.", "hi")]


def texts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with plain text as content, as a text model's template wants it."""
    return [
        {
            "messages": [
                {
                    **message,
                    "content": message["content"]
                    if isinstance(message["content"], str)
                    else "".join(part["text"] for part in message["content"]),
                }
                for message in row["messages"]
            ]
        }
        for row in rows
    ]


def product(rows: Sequence[dict[str, Any]], folder: Path, model: PreTrainedModel, processor: Any) -> list[Example]:
    """The examples as training reads them from a file."""
    path = chats.write(folder / "data.jsonl", rows)
    return list(load_examples(path, Renderer(processor, model.config), 4096, "stop"))


def alone(rows: Sequence[dict[str, Any]], folder: Path, processor: Any) -> list[oracle.Example]:
    """The examples as transformers' processor makes them in one piece; every target weighs 1 / (targets of its row)."""
    return [_alone(row["messages"], folder, processor) for row in rows]


def _alone(messages: list[dict[str, Any]], folder: Path, processor: Any) -> oracle.Example:
    parts = [part for message in messages for part in message["content"] if isinstance(part, dict)]
    pictures = [PIL.Image.open(folder / part["image"]).convert("RGB") for part in parts if part["type"] == "image"]
    given = {"images": pictures} if pictures else {}

    def encode(turns: list[dict[str, Any]], **options: Any) -> Any:
        written = processor.apply_chat_template(turns, tokenize=False, **options)
        return processor(text=[written], return_tensors="pt", **given)

    whole = encode(messages)
    ids = whole["input_ids"][0]
    first = encode(messages[:-1], add_generation_prompt=True)["input_ids"].shape[1]
    tokenizer = getattr(processor, "tokenizer", processor)
    last = int((ids == tokenizer.convert_tokens_to_ids("<|im_end|>")).nonzero()[-1])
    targets = torch.arange(first, last + 1)
    weights = torch.full((len(targets),), 1 / len(targets), dtype=torch.float64)
    return oracle.Example(ids, targets, weights, whole.get("pixel_values"), whole.get("image_grid_thw"))
