"""One row of a chat JSONL file: its structure, checked.

A row is `{"id"?: text, "meta"?: anything, "tools"?: [...], "messages": [{"role": ..., "content": ...}]}`, content
either text or a list of `{"type": "text", "text": ...}` and `{"type": "image", "image": "path/below/the/file.png"}`:
transformers' convention, as are `tools` (JSON schemas), an assistant's `tool_calls` and the role `tool`. The last
message is the assistant's; its text and calls are the target. Instead of a path an image may be a data URI; and it may
stand in the row's list `images`, from which parts without an image of their own take theirs in order. What OpenAI's
interface writes is read too: a call's arguments as the text of their object, and `{"type": "image_url", "image_url":
{"url": ...}}`. `meta` is the user's own and is not read.

Several answers to the same messages: `{"messages": [...], "targets": [...]}`, the messages without the last answer,
each target a text, a list of parts or a whole message of the assistant's. The row then stands for as many examples,
each of which counts as if it had a row of its own.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from configs.errors import UserError
from configs.wording import counted, shown
from prefix_train import strict_json

KEYS = {
    "system": ("role", "content"),
    "user": ("role", "content"),
    "assistant": ("role", "content", "tool_calls"),
    "tool": ("role", "content", "name", "tool_call_id"),
}
"""What a message of each role may hold."""


@dataclass(frozen=True, slots=True)
class Part:
    """One item of a message's content list: a text, or an image by its path below the data file's folder."""

    kind: Literal["text", "image"]
    value: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn; `content` is a text or a list of parts, `more` what else of KEYS it holds, as the row has it."""

    role: str
    content: str | tuple[Part, ...]
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The functions that it calls, each as `{"name": text, "arguments": object}`."""
        return [call["function"] for call in self.more.get("tool_calls", [])]

    @property
    def images(self) -> list[str]:
        """Paths of its images, in order."""
        return [] if isinstance(self.content, str) else [part.value for part in self.content if part.kind == "image"]

    @property
    def texts(self) -> list[str]:
        """Its texts; neighbours are joined, since a template joins them too."""
        if isinstance(self.content, str):
            return [self.content]
        texts = [""]
        for part in self.content:
            if part.kind == "text":
                texts[-1] += part.value
            else:
                texts.append("")
        return [text for text in texts if text]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A checked row: at least one message, the last one the assistant's, with text or a call and without images.

    id: the row's name; of one of several targets with `/1`, `/2`, ... behind it.
    """

    id: str | None
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def images(self) -> list[str]:
        """Paths of all images, in order."""
        return [path for message in self.messages for path in message.images]

    @property
    def answer(self) -> str:
        """Text of the last message."""
        return "".join(self.messages[-1].texts)

    def through(self, index: int) -> Conversation:
        """What was said until `messages[index]`, that one included."""
        return replace(self, messages=self.messages[: index + 1])


def targets_of(record: Any, source: str) -> Sequence[int | None]:
    """Which targets of `record`, one decoded JSON value, are examples: `parse` takes one after the other.

    None where its last message is the target. Raises UserError where `targets` is no list with something in it.
    """
    targets = record.get("targets") if isinstance(record, dict) else None
    if targets is None:
        return (None,)
    if not isinstance(targets, list) or not targets:
        what = _kind(targets) if not isinstance(targets, list) else "an empty list"
        raise UserError(f"{source}: targets is {what}; write a list of answers, or end the messages with one")
    return range(len(targets))


def place_of(source: str, target: int | None) -> str:
    """How messages name an example: its row, as `file:line`, and where that has several targets which one."""
    return source if target is None else f"{source} target {target + 1}"


def parse(record: Any, source: str, target: int | None = None) -> Conversation:
    """`record`, one decoded JSON value, as a conversation.

    source: where it stands, as `file:line`. target: which of its `targets` is the last message, see `targets_of`.
    Raises UserError, beginning with `source`, for anything that is not a row.
    """
    if not isinstance(record, dict):
        raise UserError(f'{source}: the row is {_kind(record)}; write an object with "messages"')
    _refuse_unknown(record, ("id", "messages", "targets", "meta", "tools", "images"), source, "row")
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        what = "has no messages" if not messages and isinstance(messages, list | None) else f"has {_kind(messages)}"
        raise UserError(f'{source}: the row {what}; write a list of {{"role", "content"}} under "messages"')
    if record.get("images") is not None:
        messages = _with_images(messages, record["images"], source)
    name = _identity(record["id"], source) if "id" in record else None
    turns = [_message(message, source, f"messages[{index}]") for index, message in enumerate(messages)]
    if target is not None:
        if turns[-1].role == "assistant":
            raise UserError(f"{source}: the row has targets, and its messages end with an answer; leave one out")
        name = name and f"{name}/{target + 1}"
        turns.append(_answer(record["targets"][target], source, f"targets[{target}]"))
    conversation = Conversation(name, tuple(turns), _tools(record.get("tools") or [], source))
    check_target(conversation, source)
    return conversation


def _with_images(messages: list[Any], images: Any, source: str) -> list[Any]:
    """The messages, with the row's `images` in the parts that have none of their own."""
    if not isinstance(images, list):
        raise UserError(f"{source}: images is {_kind(images)}; write a list of images")
    left, used = iter(images), 0
    filled = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else []
        missing = [i for i, part in enumerate(parts) if isinstance(part, dict) and _given(part) == {"type": "image"}]
        used += len(missing)
        new = {i: {"type": "image", "image": image} for i, image in zip(missing, left, strict=False)}
        filled.append({**message, "content": [new.get(i, part) for i, part in enumerate(parts)]} if new else message)
    if used != len(images):
        raise UserError(
            f"{source}: {counted(len(images), 'image')} for {counted(used, 'part')} of the type image "
            "without one of their own"
        )
    return filled


def _given(part: dict[str, Any]) -> dict[str, Any]:
    """What of `part` is not null."""
    return {key: value for key, value in part.items() if value is not None}


def strings(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys included."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            todo += [*one.values(), *one.keys()]
        elif isinstance(one, list):
            todo += one
        elif isinstance(one, str):
            yield one


def _identity(value: Any, source: str) -> str:
    text = _text(value, source, "id")
    if not text.strip():
        raise UserError(f"{source}: id is empty; leave it out or write a name")
    return text


def _answer(target: Any, source: str, where: str) -> Message:
    """One of the row's targets."""
    if not isinstance(target, dict):
        return _message({"role": "assistant", "content": target}, source, where)
    if target.get("role", "assistant") != "assistant":
        raise UserError(f"{source}: {where} has the role {shown(target['role'])}; an answer is the assistant's")
    return _message({"role": "assistant", **target}, source, where)


def _message(message: Any, source: str, where: str) -> Message:
    if not isinstance(message, dict):
        raise UserError(f'{source}: {where} is {_kind(message)}; write {{"role": ..., "content": ...}}')
    role = message.get("role")
    if not isinstance(role, str) or role not in KEYS:
        raise UserError(f"{source}: {where} has the role {shown(role)}; write one of {', '.join(KEYS)}")
    _refuse_unknown(message, KEYS[role], source, where)
    more = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
    for key, value in more.items():
        if key == "tool_calls":
            more[key] = _calls(value, source, f"{where}.tool_calls")
        else:
            _text(value, source, f"{where}.{key}")
    content = message.get("content")
    if isinstance(content, list):
        if not content:
            raise UserError(f"{source}: {where}.content is an empty list; write a text or a list of parts")
        parts = (_part(part, source, f"{where}.content[{i}]") for i, part in enumerate(content))
        return Message(role, tuple(parts), more)
    if content is None and more.get("tool_calls"):
        content = ""
    return Message(role, _text(content, source, f"{where}.content"), more)


def _calls(calls: Any, source: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise UserError(f"{source}: {where} is {_kind(calls)}; write a list")
    return [_call(call, source, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, source: str, where: str) -> dict[str, Any]:
    """A call whose arguments are an object, also where they were its text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        form = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
        raise UserError(f"{source}: {where} names no function; write {form}")
    _refuse_unknown(call, ("type", "id", "function"), source, where)
    _refuse_unknown(function, ("name", "arguments"), source, f"{where}.function")
    place, arguments = f"{source}: {where}.function.arguments", function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = strict_json.loads(arguments)
        except ValueError as error:
            raise UserError(f"{place} is no text of a JSON object: {error}") from error
        except RecursionError:
            raise UserError(f"{place} is nested too deeply") from None
    if not isinstance(arguments, dict):
        raise UserError(f"{place} is {_kind(arguments)}; write an object, or one as text")
    made = {**call, "function": {**function, "arguments": arguments}}
    for text in strings(made):
        _text(text, source, where)
    return made


def _tools(tools: Any, source: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{source}: tools is no list of objects; write the JSON schema of each function")
    for text in strings(tools):
        _text(text, source, "tools")
    return tuple(tools)


def _part(part: Any, source: str, where: str) -> Part:
    if not isinstance(part, dict):
        raise UserError(f'{source}: {where} is {_kind(part)}; write {{"type": "text", "text": ...}}')
    kind = part.get("type")
    if kind == "image_url":
        return Part("image", _text(_url(part, source, where), source, f"{where}.image_url"))
    if kind not in ("text", "image"):
        raise UserError(f"{source}: {where} has the type {shown(kind)}; write text or image")
    _refuse_unknown(part, ("type", kind), source, where)
    return Part(kind, _text(part.get(kind), source, f"{where}.{kind}"))


def _url(part: dict[str, Any], source: str, where: str) -> Any:
    """Of a part as OpenAI's interface has it; how sharply it looked at the image is its own affair."""
    _refuse_unknown(part, ("type", "image_url"), source, where)
    if not isinstance(given := part.get("image_url"), dict):
        return given
    _refuse_unknown(given, ("url", "detail"), source, f"{where}.image_url")
    return given.get("url")


def _text(value: Any, source: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{source}: {where} is {_kind(value)}; write a text")
    if "\0" in value:
        raise UserError(f"{source}: {where} holds a NUL character; remove it")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])
        raise UserError(f"{source}: {where} holds half a surrogate pair, {half}; write whole characters") from None
    return value


def check_target(conversation: Conversation, source: str) -> None:
    """Raise UserError unless the last message can be learned."""
    last = conversation.messages[-1]
    if last.role != "assistant":
        raise UserError(f"{source}: no target: the last message is the {last.role}'s; end with the assistant's")
    if last.images:
        raise UserError(f"{source}: the target holds an image; the last message may hold text only")
    if not conversation.answer.strip() and not last.calls:
        raise UserError(f"{source}: the target is empty: the assistant's last message has no text")


def _refuse_unknown(record: dict[Any, Any], known: tuple[str, ...], source: str, where: str) -> None:
    """Raise UserError for a key that is not `known`, unless it is null: what a table has written has every key."""
    for key, value in record.items():
        if value is not None and key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.7)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            hint += "; what is your own goes under meta" if "meta" in known and not near else ""
            raise UserError(f"{source}: {where} has the unknown key {shown(key)}; {hint}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
