"""Chat rows, images and processors for tests of the data: the demonstration's processor and other chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from transformers import LlamaConfig, PreTrainedConfig

from configs import compose
from configs.schema import Config
from prefix_train import tiny
from prefix_train.data import Examples, load_examples
from prefix_train.render import Example, Renderer
from tests.tiny_vision import BUILD

THINKING = """
{%- macro content_of(message) -%}
    {%- if message.content is string -%}{{ message.content }}
    {%- else -%}
        {%- for item in message.content -%}
            {%- if item.type == 'image' -%}
                {%- if message.role == 'system' -%}
                    {{ raise_exception('System message cannot contain images.') }}
                {%- endif -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- else -%}{{ item.text }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {%- set content = content_of(message)|trim -%}
    {%- set thought = '' -%}
    {%- if '</think>' in content -%}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1]|trim -%}
        {%- set content = content.split('</think>')[-1]|trim -%}
    {%- endif -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.role == 'assistant' and loop.last -%}
        {{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""
"""As a thinking model's: it trims, refuses images in the system message, and treats the last answer specially."""

SPACED = """
{%- for message in messages -%}
    {{- message.role + ':' + ' ' + message.content + ('<|im_end|>' if message.role == 'assistant' else ' ') -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}
"""
"""The space before the answer is the generation prompt's no more: a word of the answer carries it."""

GLUED = """
{%- for message in messages -%}{{- message.role + '\\n' + message.content + '<|im_end|>' -}}{%- endfor -%}
"""
"""The line break before the answer can become one token with what the answer begins with."""

TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""As of models that call functions: calls and their results between tags, the tools in the system message."""


def processor(template: str | None = None) -> Any:
    """The demonstration's processor, with another chat template if one is given."""
    made = tiny.build_processor(config())
    if template is not None:
        made.chat_template = made.tokenizer.chat_template = template
    return made


@cache
def config() -> PreTrainedConfig:
    """A vision-language model's that fits the processor."""
    return tiny.build_config(BUILD)


@cache
def text_config() -> PreTrainedConfig:
    """A plain decoder's."""
    return LlamaConfig(vocab_size=len(tiny.build_tokenizer()))


def fresh_renderer() -> Renderer:
    """Of the demonstration's processor, with nothing read yet."""
    return Renderer(processor(), config())


@cache
def renderer() -> Renderer:
    """Of the demonstration's processor."""
    return fresh_renderer()


def text_renderer(template: str | None = None) -> Renderer:
    """Of the tokenizer alone, for a plain decoder."""
    tokenizer = tiny.build_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return Renderer(tokenizer, text_config())


def load(path: Path, **options: Any) -> Examples:
    """The examples at `path` as the demonstration's processor renders them."""
    return load_examples(path, fresh_renderer(), 4096, **options)


def same(mine: Example, other: Example) -> bool:
    """Are these the same tokens, images and answer?"""
    arrays = all(np.array_equal(getattr(mine, n), getattr(other, n)) for n in ("ids", "keys", "position_ids", "target"))
    pixels = all(np.array_equal(a.load(), b.load()) for a, b in zip(mine.images, other.images, strict=True))
    return arrays and pixels and mine.answer == other.answer


def configured(folder: Path, data: Path) -> Config:
    """The configuration `c.yaml`, which is written into `folder`, of a run on `data`."""
    given = {
        "run_root": str(folder / "runs"),
        "cluster": "local",
        "model": {"build": dict(BUILD)},
        "data": {"train": str(data)},
        "pack": {"packs_per_update": 2},
        "train": {"epochs": 1},
    }
    (folder / "c.yaml").write_text(json.dumps(given))
    return compose.load(folder / "c.yaml", [])


def row(question: Any = "What is it?", answer: Any = "A seven.", system: Any = None, **more: Any) -> dict[str, Any]:
    """A row with one question and its answer."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **more}


def picture(path: str) -> dict[str, str]:
    return {"type": "image", "image": path}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def draw(path: Path, width: int = 32, height: int = 32, seed: int = 0) -> Path:
    """Write a PNG of random colours."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(values).save(path)
    return path


def blank() -> PIL.Image.Image:
    return PIL.Image.new("RGB", (32, 32))


def write(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows as JSONL; bytes are written as they are."""
    lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path
