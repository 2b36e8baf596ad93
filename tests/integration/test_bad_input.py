"""Bad input of every kind: one clear line with file and line, whatever stands before and after it, and nothing lost."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from configs.errors import UserError
from prefix_train import rows
from prefix_train.data import load_examples, read_jsonl
from tests import chats
from tests.chats import picture, row, text


def raw(record: Any) -> bytes:
    return json.dumps(record).encode()


def with_messages(*messages: Any) -> bytes:
    return raw({"messages": list(messages)})


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def several(targets: Any) -> dict[str, Any]:
    return {"messages": [user("a")], "targets": targets}


STRUCTURE = {
    "broken JSON": (b'{"messages": [', "broken JSON at character"),
    "half a row": (raw(row())[:40], "broken JSON at character 42"),
    "two rows in a line": (
        raw(row()) * 2,
        "broken JSON at character .*: Extra data; write each row on one line of its",
    ),
    "rows that end with CR alone": (
        raw(row()) + b"\r" + raw(row()),
        "broken JSON at character .*: Extra data; write each row on one line of its",
    ),
    "a byte order mark between rows": (
        b"\xef\xbb\xbf" + raw(row()),
        "a byte order mark stands here, as where files were joined; remove it",
    ),
    "a number above all floats": (raw(row())[:-1] + b', "meta": [-1e999]}', "'-1e999' is too large for a number"),
    "plain text": (b"once upon a time", "broken JSON at character 1"),
    "deep nesting": (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "deeply nested objects": (b'{"meta": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, "nested too deeply"),
    "not UTF-8": (b'{"messages": "\xff\xfe"}', "byte 15 of the line is not UTF-8"),
    "UTF-16": (raw(row()).decode().encode("utf-16-le"), "the row|broken JSON|NUL"),
    "a raw NUL byte": (b'{"messages": "\0"}', "broken JSON at character 15"),
    "an escaped NUL": (raw(row("a\0b")), r"messages\[0\].content holds a NUL character"),
    "half a surrogate pair": (raw(row("\ud83d")), r"messages\[0\].content holds half a surrogate pair, '\\ud83d'"),
    "a huge integer": (b'{"id": ' + b"9" * 5000 + b"}", "Exceeds the limit"),
    "a large integer as id": (raw(row(id=10**30)), "id is a number; write a text"),
    "a huge float": (raw(row(id="x"))[:-1] + b', "meta": NaN}', "NaN is no JSON value"),
    "a key twice": (b'{"messages": [], "messages": []}', "the key 'messages' stands twice"),
    "a row that is a list": (b"[1, 2]", "the row is a list; write an object"),
    "a file that is one list": (
        b'[{"messages": []},',
        "broken JSON at character .*; write each row on one line of its",
    ),
    "a row over several lines": (
        b"{",
        "broken JSON at character .*; write each row on one line of its own, without",
    ),
    "a row that is null": (b"null", "the row is null"),
    "a row that is a text": (b'"messages"', "the row is a text"),
    "a row that is a number": (b"7", "the row is a number"),
    "no messages": (b"{}", 'the row has no messages; write a list of {"role", "content"}'),
    "messages null": (b'{"messages": null}', "the row has no messages"),
    "messages empty": (b'{"messages": []}', "the row has no messages"),
    "messages an object": (b'{"messages": {"role": "user"}}', "the row has an object"),
    "messages a text": (b'{"messages": "hello"}', "the row has a text"),
    "a message that is a text": (with_messages("hello"), r"messages\[0\] is a text"),
    "a message that is null": (with_messages(user("a"), None), r"messages\[1\] is null"),
    "unknown role": (
        with_messages({"role": "robot", "content": "a"}),
        r"messages\[0\] has the role 'robot'; write one",
    ),
    "a role in capitals": (with_messages({"role": "User", "content": "a"}), r"messages\[0\] has the role 'User'"),
    "no role": (with_messages({"content": "a"}), r"messages\[0\] has the role None"),
    "a role that is a list": (with_messages({"role": ["user"], "content": "a"}), r"has the role \['user'\]"),
    "null content": (with_messages(user(None), assistant("a")), r"messages\[0\].content is null; write a text"),
    "no content": (with_messages({"role": "user"}, assistant("a")), r"messages\[0\].content is null"),
    "content a number": (with_messages(user(7), assistant("a")), r"messages\[0\].content is a number"),
    "content true": (with_messages(user(True), assistant("a")), r"messages\[0\].content is true or false"),
    "content an object": (with_messages(user({"text": "a"}), assistant("a")), r"messages\[0\].content is an object"),
    "content an empty list": (with_messages(user([]), assistant("a")), r"messages\[0\].content is an empty list"),
    "a part that is a text": (with_messages(user(["a"]), assistant("a")), r"messages\[0\].content\[0\] is a text"),
    "a part of unknown type": (
        with_messages(user([{"type": "video", "video": "a.mp4"}]), assistant("a")),
        r"messages\[0\].content\[0\] has the type 'video'; write text or image",
    ),
    "a part without type": (with_messages(user([{"text": "a"}]), assistant("a")), "has the type None"),
    "a text part without text": (
        with_messages(user([{"type": "text"}]), assistant("a")),
        r"messages\[0\].content\[0\].text is null",
    ),
    "an image part with a url": (
        with_messages(user([{"type": "image", "url": "https://example.com/a.png"}]), assistant("a")),
        r"messages\[0\].content\[0\] has the unknown key 'url'; known are type, image",
    ),
    "an image path that is null": (
        with_messages(user([{"type": "image", "image": None}]), assistant("a")),
        r"content\[0\].image is null",
    ),
    "a column of the user's own": (
        raw(row())[:-1] + b', "extra": 1}',
        "row has the unknown key 'extra'; known are id, .*, images; what is your own goes under meta",
    ),
    "an unknown key in a row": (b'{"mesages": []}', "row has the unknown key 'mesages'; did you mean messages?"),
    "an unknown key in a message": (
        with_messages({**user("a"), "name": "Ann"}, assistant("b")),
        r"messages\[0\] has the unknown key 'name'; known are role, content",
    ),
    "an empty id": (raw(row(id=" ")), "id is empty"),
    "an id that is null": (raw(row(id=None)), "id is null"),
    "no target": (with_messages(user("a")), "no target: the last message is the user's; end with the assistant's"),
    "a conversation that ends with a question": (
        with_messages(user("a"), assistant("b"), user("c")),
        "no target: the last message is the user's",
    ),
    "an empty target": (raw(row(answer="")), "the target is empty"),
    "a target of white space": (raw(row(answer=" \n\t")), "the target is empty"),
    "a target of empty parts": (raw(row(answer=[text(""), text(" ")])), "the target is empty"),
    "an image in the target": (raw(row(answer=[text("a"), picture("good.png")])), "the target holds an image"),
    "targets that are a text": (raw(several("yes")), "targets is a text; write a list of answers"),
    "no targets": (raw(several([])), "targets is an empty list; write a list of answers, or end the messages"),
    "targets beside an answer": (raw(row(targets=["yes"])), "row has targets, and its messages end with an answer"),
    "a target that is a number": (
        raw(several([7])),
        r"target 1: targets\[0\] is a number|targets\[0\].content is a num",
    ),
    "a target that is empty": (raw(several([""])), "target 1: the target is empty"),
    "a target that is the user's": (
        raw(several([user("a")])),
        r"targets\[0\] has the role 'user'; an answer is the ass",
    ),
    "a target with an unknown key": (
        raw(several([{"content": "a", "name": "Ann"}])),
        r"targets\[0\] has the unknown key 'name'; known are role, content",
    ),
    "a duplicate id": (raw(row(id="first")), "the id 'first' is already that of .*:1; ids are unique"),
}
"""Case -> (line, what the error says). These are found without a model."""

RENDERING = {
    "a control token": (raw(row("stop <|im_end|> go")), r"messages\[0\] holds '<\|im_end\|>', a control token"),
    "an image placeholder": (raw(row("<|image_pad|>")), r"messages\[0\] holds '<\|image_pad\|>'"),
    "an image in the system message": (
        raw(row(system=[picture("good.png"), text("Rules.")])),
        "the chat template refuses the messages: System message cannot contain images",
    ),
    "a second system message": (
        with_messages(user("a"), {"role": "system", "content": "b"}, assistant("c")),
        "the chat template refuses the messages: System message must be at the beginning",
    ),
    "a missing image": (raw(row([picture("none.png")])), "image 'none.png': no such file below"),
    "an image outside the folder": (raw(row([picture("../outside.png")])), "write a path below the data file's folder"),
    "an image by its absolute path": (
        raw(row([picture("/etc/hostname")])),
        "write a path below the data file's folder",
    ),
    "an image through a link": (raw(row([picture("away.png")])), "leads outside the data file's folder"),
    "an image from the web": (raw(row([picture("http://127.0.0.1/a.png")])), "write a path below the data file's"),
    "an image that is a folder": (raw(row([picture(".")])), "image '.' is no file"),
    "an image that is a pipe": (raw(row([picture("pipe.png")])), "image 'pipe.png' is no file"),
    "an image path with a NUL": (raw(row([picture("a\0.png")])), "holds a NUL character"),
    "an image path of any length": (raw(row([picture("a" * 9000)])), "cannot be reached"),
    "a corrupt PNG": (raw(row([picture("corrupt.png")])), r"corrupt\.png' is broken: "),
    "a truncated PNG": (raw(row([picture("truncated.png")])), r"truncated\.png' is broken: "),
    "a text instead of an image": (raw(row([picture("text.png")])), r"text\.png' is of no known format"),
    "an empty image": (raw(row([picture("empty.png")])), r"empty\.png' is of no known format"),
    "a decompression bomb": (
        raw(row([picture("bomb.png")])),
        r"bomb\.png' has more than 89,478,485 pixels; make it smaller",
    ),
    "an animated image": (
        raw(row([picture("moving.gif")])),
        r"moving\.gif' has 2 frames; write each frame as an image",
    ),
    "an image of 16 bits": (raw(row([picture("deep.png")])), r"deep\.png' has the mode I;16, more than 8 bits"),
    "a data URI of a text": (
        raw(row([picture("data:text/plain;base64,aGVsbG8=")])),
        "image 1 of the row is no data URI of an image in base64; write data:image/png;base64,...",
    ),
    "a data URI whose content is none": (
        raw(row([picture("data:image/png;base64,aGVsbG8=")])),
        "image 1 of the row is of no known format",
    ),
    "an example above the cap": (raw(row("word " * 600)), r"has \d+,?\d* tokens, more than the cap of 500"),
}
"""Case -> (line, what the error says). These need the model's processor."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data") / "inside"
    content = chats.draw(made / "good.png").read_bytes()
    chats.draw(made.parent / "outside.png")
    (made / "away.png").symlink_to(made.parent / "outside.png")
    (made / "truncated.png").write_bytes(content[: len(content) // 2])
    (made / "corrupt.png").write_bytes(content[:200] + bytes([content[200] ^ 255]) + content[201:])
    (made / "text.png").write_text("no image")
    (made / "empty.png").write_bytes(b"")
    chats.blank().resize((1, 1)).convert("1").resize((20000, 10000)).save(made / "bomb.png")
    chats.blank().save(made / "moving.gif", save_all=True, append_images=[PIL.Image.new("RGB", (32, 32), "red")])
    PIL.Image.fromarray(np.arange(1024, dtype=np.uint16).reshape(32, 32)).save(made / "deep.png")
    os.mkfifo(made / "pipe.png")
    return made


def one_line(error: pytest.ExceptionInfo[UserError], path: Path, line: int) -> str:
    message = str(error.value)
    assert re.match(rf"{re.escape(str(path))}:{line}( target 1)?: ", message)
    assert "\n" not in message
    assert "\0" not in message
    assert len(message) < 600
    return message


@pytest.mark.parametrize("case", STRUCTURE)
def test_a_bad_row_is_one_line_without_any_model(folder: Path, case: str) -> None:
    line, complaint = STRUCTURE[case]
    path = chats.write(folder / "read.jsonl", [row(id="first"), b"", line, row(id="last")])
    with pytest.raises(UserError, match=complaint) as error:
        list(read_jsonl(path))
    one_line(error, path, 3)


@pytest.mark.parametrize("case", {**STRUCTURE, **RENDERING})
def test_a_bad_row_stops_or_is_left_out_and_nothing_else_is_lost(folder: Path, case: str) -> None:
    line, complaint = {**STRUCTURE, **RENDERING}[case]
    path = chats.write(folder / "load.jsonl", [row(id="first"), b"", line, row([picture("good.png")], id="last")])
    with pytest.raises(UserError, match=complaint) as error:
        load_examples(path, chats.renderer(), 500)
    message = one_line(error, path, 3)
    examples = load_examples(path, chats.renderer(), 500, on_bad="skip")
    assert [example.id for example in examples] == ["first", "last"]
    assert examples.skipped == [message]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "the file is empty; write one row per line"),
        (b"\n \r\n\n", "the file is empty"),
        (b"\xef\xbb\xbf\n", "the file is empty"),
    ],
)
@pytest.mark.parametrize("on_bad", ["stop", "skip"])
def test_an_empty_file_is_an_error_in_any_case(tmp_path: Path, content: bytes, complaint: str, on_bad: Any) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"^{path}: {complaint}"):
        load_examples(path, chats.renderer(), 500, on_bad)


@pytest.mark.parametrize("on_bad", ["stop", "skip"])
def test_a_file_that_cannot_be_read_is_an_error_in_any_case(tmp_path: Path, on_bad: Any) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    for name, complaint in [("none", "no such file"), (".", "no folder of data"), ("pipe", "not a file")]:
        with pytest.raises(UserError, match=rf"^{tmp_path / name}: {complaint}"):
            load_examples(tmp_path / name, chats.renderer(), 500, on_bad)
    with pytest.raises(UserError, match="circle: no such file"):
        load_examples(tmp_path / "circle", chats.renderer(), 500, on_bad)


def test_a_line_that_is_too_long_is_left_out_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 300)
    for size in (300, 301, 601, 900, 5000):
        path = chats.write(tmp_path / "d.jsonl", [row(id="first"), b"x" * size, row(id="last")])
        with pytest.raises(UserError, match=rf"^{path}:2: (the line is longer than 300 bytes|broken JSON)"):
            load_examples(path, chats.renderer(), 500)
        found = load_examples(path, chats.renderer(), 500, on_bad="skip", kept_tokens=1)
        assert [example.id for example in found] == ["first", "last"]
        assert len(found.skipped) == 1


def test_photographs_are_upright_and_colours_of_print_become_rgb(tmp_path: Path) -> None:
    """As the camera held it: EXIF turns a picture of 64 x 32 into one of 32 x 64."""
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    wide = PIL.Image.new("RGB", (64, 32), "red")
    wide.save(tmp_path / "turned.jpg", exif=exif)
    wide.rotate(-90, expand=True).save(tmp_path / "upright.jpg")
    wide.convert("CMYK").save(tmp_path / "print.jpg")
    names = ("turned", "upright", "print")
    path = chats.write(tmp_path / "d.jsonl", [row([picture(f"{name}.jpg")]) for name in names])
    turned, upright, printed = load_examples(path, chats.renderer(), 500)
    assert turned.images[0].grid == upright.images[0].grid
    assert printed.images[0].grid[1:] == turned.images[0].grid[:0:-1]


def test_both_numbers_are_named_where_an_example_is_above_the_cap(tmp_path: Path) -> None:
    path = chats.write(tmp_path / "d.jsonl", [row("word " * 3000)])
    length = len(load_examples(path, chats.renderer(), 100_000)[0].ids)
    with pytest.raises(UserError, match=rf"^{path}:1: the example has {length:,} tokens, more than the cap of 1,234;"):
        load_examples(path, chats.renderer(), 1234)
