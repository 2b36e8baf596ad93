"""What a model's own chat template makes of a conversation, and where in that the assistant's answers stand.

Where an answer begins and ends is read off renderings by the template itself, never off the words it writes. An answer
before the last one counts only if the whole conversation begins as the one that ends with it: then its loss in the long
conversation is exactly that of the short one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jinja2

from configs.errors import UserError
from configs.wording import shown
from prefix_train import chat
from prefix_train.chat import Conversation, Message

STAND_IN = "(the text of the last answer goes here: 7f3b9c)"
"""Rendered in the answer's place to see what the template puts before and after it."""

Targets = Literal["last", "all"]


@dataclass(frozen=True, slots=True)
class Span:
    """An answer: characters [start, end) of the rendered text, and the number of images before it."""

    start: int
    end: int
    images: int


class ChatTemplate:
    """The chat template of a processor, or of a tokenizer for text."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._with_images = hasattr(processor, "tokenizer")

    def spans(self, conversation: Conversation, source: str, targets: Targets) -> tuple[str, list[Span]]:
        """The rendered text and the answers in it, in order: the last one, or all.

        Raises UserError, beginning with `source`, where the template drops something, or does not show where an answer
        begins or ends.
        """
        text, last = self._last(conversation, source)
        if targets == "last":
            return text, [last]
        found: list[Span] = []
        for index, message in enumerate(conversation.messages[:-1]):
            if message.role != "assistant":
                continue
            short = conversation.through(index)
            chat.check_target(short, f"{source}: messages[{index}]")
            begin, span = self._last(short, source)
            if not text.startswith(begin.rstrip()):
                raise UserError(
                    f"{source}: {self._name} writes messages[{index}] unlike an answer that was just given, so that "
                    "data.targets=all would not train it exactly; write one row for each answer (what rows share is "
                    "computed once), or use data.targets=last"
                )
            found.append(span)
        return text, [*found, last]

    def turns(self, conversation: Conversation) -> list[dict[str, Any]]:
        """The messages as the template reads them."""
        return [{"role": m.role, "content": self._content(m), **m.more} for m in conversation.messages]

    def whole(self, turns: list[dict[str, Any]], conversation: Conversation) -> Any:
        """What the processor in one piece makes of `turns`, token ids and pixels."""
        return self._processor.apply_chat_template(
            turns, tokenize=True, return_dict=True, tools=list(conversation.tools) or None
        )

    @property
    def _name(self) -> str:
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        return f"the chat template of {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}"

    def _last(self, conversation: Conversation, source: str) -> tuple[str, Span]:
        """The rendered text, and where in it the last message stands."""
        turns = self.turns(conversation)
        text = self._write(turns, conversation, source)
        around = self._write([*turns[:-1], {"role": "assistant", "content": STAND_IN}], conversation, source)
        head, found, tail = around.rpartition(STAND_IN)
        if not text.startswith(head) and turns[:-1]:
            # The template took the answer apart, as with one that holds its reasoning.
            head = self._write(turns[:-1], conversation, source, add_generation_prompt=True)
        start, end = len(head), len(text) - len(tail)
        if not found or start > end or not text.startswith(head) or not text.endswith(tail):
            raise UserError(
                f"{source}: cannot tell where the answer begins: the chat template writes it unlike its own prompt"
            )
        _check_nothing_lost(conversation, text, text[start:end], source)
        return text, Span(start, end, len(conversation.images))

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        if isinstance(message.content, str):
            return message.content
        if not self._with_images:
            # Templates of text models expect text: given a list they drop it or print it as Python.
            return "".join(part.value for part in message.content)
        return [{"type": part.kind, part.kind: part.value} for part in message.content]

    def _write(
        self,
        turns: list[dict[str, Any]],
        conversation: Conversation,
        source: str,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        try:
            text: str = self._processor.apply_chat_template(
                turns,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                tools=list(conversation.tools) or None,
            )
        except jinja2.TemplateError as error:
            raise UserError(f"{source}: the chat template refuses the messages: {error}") from error
        return text


def _check_nothing_lost(conversation: Conversation, text: str, answer: str, source: str) -> None:
    last = len(conversation.messages) - 1
    for index, message in enumerate(conversation.messages):
        for part in message.texts if message.role != "assistant" else []:
            if part.strip() not in text:
                raise UserError(f"{source}: the chat template drops or changes the text of messages[{index}]")
        for call in message.calls:
            if not all(_written(value, answer if index == last else text) for value in _leaves(call)):
                raise UserError(f"{source}: the chat template drops or changes a tool call of messages[{index}]")
    for tool in conversation.tools:
        if isinstance(name := tool.get("function", tool).get("name"), str) and not _written(name, text):
            raise UserError(f"{source}: the chat template drops the tool {shown(name)}")
    if conversation.answer.split("</think>")[-1].strip() not in answer or not answer.strip():
        raise UserError(f"{source}: the chat template drops or changes the text of the answer")


def _leaves(call: dict[str, Any]) -> Iterator[Any]:
    """The name, keys, texts and numbers of a call."""
    yield from chat.strings([call["name"], call["arguments"]])
    todo = [call["arguments"]]
    while todo:
        value = todo.pop()
        if isinstance(value, dict | list):
            todo += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield value


def _written(value: Any, text: str) -> bool:
    """Whether `value` stands in `text`, as it is or as JSON has it."""
    forms = [str(value), *(json.dumps(value, ensure_ascii=plain).strip('"') for plain in (True, False))]
    return any(form in text for form in forms)
