"""A folder of prompts: the examples that chat JSONL gives, and an error for what would silently not be learned."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from configs import console
from configs.errors import UserError
from prefix_train import cli, lengths
from prefix_train.data import Examples
from tests import chats
from tests.chats import configured, load, picture, row, text

SORT, COUNT = "You sort things. " * 10, "You count things.\n\nNothing else. " * 10


def made(folder: Path, instructions: str | bytes, items: Sequence[Any], name: str = "system.md") -> Path:
    """A set of instructions."""
    folder.mkdir(parents=True, exist_ok=True)
    content = instructions if isinstance(instructions, bytes) else instructions.encode()
    (folder / name).write_bytes(content)
    chats.write(folder / "items.jsonl", items)
    return folder


def item(number: int, **more: Any) -> dict[str, Any]:
    return {"input": f"Which is {number}?", "target": f"It is {number}.", **more}


def same(mine: Examples, other: Examples) -> bool:
    return len(mine) == len(other) and all(map(chats.same, mine, other))


@pytest.mark.parametrize("kept", [1, 1 << 20], ids=["read again", "kept"])
def test_sets_of_instructions_hold_what_chat_rows_hold(tmp_path: Path, kept: int) -> None:
    chats.draw(tmp_path / "data" / "sort" / "scans" / "a.png")
    content = chats.draw(tmp_path / "a.png").read_bytes()
    uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    mark = b"\xef\xbb\xbf"
    made(tmp_path / "data" / "count", mark + COUNT.replace("\n", "\r\n").encode() + b"\r\n", [item(1), item(2)])
    first = json.dumps(item(3, image="scans/a.png", id="third")).encode()
    fourth = {"input": [text("Before"), picture("scans/a.png"), text("behind")], "target": "Both."}
    items = [mark + first, b"", {"images": [uri, "scans/a.png"], "target": "Two."}, fourth]
    made(tmp_path / "data" / "sort", SORT, items, "system.txt")
    (tmp_path / "data" / "README.md").write_text("What this is.")
    (tmp_path / "data" / ".DS_Store").write_bytes(b"\0")
    rows = [row(f"Which is {n}?", f"It is {n}.", COUNT.strip()) for n in (1, 2)]
    image = picture("a.png")
    for content, answer in (
        ([image, text("Which is 3?")], "It is 3."),
        ([image, image], "Two."),
        ([text("Before"), image, text("behind")], "Both."),
    ):
        rows.append(row(content, answer, SORT.strip()))
    found = load(tmp_path / "data", kept_tokens=kept)
    assert same(found, load(chats.write(tmp_path / "plain.jsonl", rows)))
    places = [("count", 1), ("count", 2), ("sort", 1), ("sort", 3), ("sort", 4)]
    assert [example.source for example in found] == [f"{tmp_path}/data/{name}/items.jsonl:{n}" for name, n in places]
    assert found[2].id == "third"
    assert [found[index].answer for index in (4, 0, 2, 1)] == ["Both.", "It is 1.", "It is 3.", "It is 2."]


def test_one_set_is_a_folder_by_itself_and_an_item_may_have_several_targets(tmp_path: Path) -> None:
    folder = made(tmp_path / "one", SORT, [{"input": "Which?", "targets": ["This.", "That."], "id": "x"}, item(7)])
    found = load(folder, kept_tokens=1)
    assert [example.id for example in found] == ["x/1", "x/2", f"{folder}/items.jsonl:2"]
    assert found[1].source == f"{folder}/items.jsonl:1 target 2"
    rows = [row("Which?", answer, SORT.strip()) for answer in ("This.", "That.")] + [row("Which is 7?", "It is 7.")]
    rows[2]["messages"].insert(0, {"role": "system", "content": SORT.strip()})
    assert same(found, load(chats.write(tmp_path / "plain.jsonl", rows)))


BAD = {
    "item.jsonl": "no part of a set of instructions: did you mean items.jsonl?",
    "System.md": "no part of a set of instructions: did you mean system.md?",
    "notes.docx": "no part of a set of instructions: a set of instructions is a folder with system.md, ",
    "more/items.jsonl": "no part of a set of instructions: a set",
    "more/system.md": "no part of a set of instructions: a set",
    "a b\nc.txt": "no part of a set of instructions: a set",
}


@pytest.mark.parametrize("nested", [False, True], ids=["one set", "several"])
@pytest.mark.parametrize("name", BAD)
def test_what_is_no_part_of_a_set_is_an_error_that_names_it(tmp_path: Path, name: str, nested: bool) -> None:
    folder = made(tmp_path / "data" / "set" if nested else tmp_path / "data", SORT, [item(1)])
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    with pytest.raises(UserError) as caught:
        load(tmp_path / "data")
    assert str(caught.value).startswith(" ".join(f"{folder / name}: {BAD[name]}".split()))


def test_folders_that_lack_something_are_errors_that_say_what(tmp_path: Path) -> None:
    def said() -> str:
        with pytest.raises(UserError) as caught:
            load(tmp_path / "data", on_bad="skip")
        return str(caught.value).replace(f"{tmp_path}/data", "DATA")

    (tmp_path / "data").mkdir()
    assert said().startswith(
        "DATA: no folder of data: it holds no parquet file, was not saved by `datasets`, and a set"
    )
    (tmp_path / "data" / "items.jsonl").write_text("{}")
    assert said().startswith("DATA: there is no system.md: a set of instructions is a folder with")
    (tmp_path / "data" / "system.md").write_text(" \n")
    assert said() == "DATA/system.md: the file is empty; write the instructions that the items share"
    (tmp_path / "data" / "system.md").write_bytes(b"caf\xe9")
    assert said() == "DATA/system.md: byte 4 is not UTF-8; save the file as UTF-8"
    (tmp_path / "data" / "system.md").write_bytes(b"a\0b")
    assert said() == "DATA/system.md: the text holds a NUL character; remove it"
    (tmp_path / "data" / "system.txt").write_text("Rules.")
    assert said() == "DATA: holds both system.md and system.txt; remove one"
    for name in ("system.txt", "items.jsonl"):
        (tmp_path / "data" / name).unlink()
    assert said().startswith("DATA: there is no items.jsonl: a set of instructions is a folder with")
    (tmp_path / "data" / "system.md").unlink()
    made(tmp_path / "data" / "good", SORT, [item(1)])
    (tmp_path / "data" / "other").mkdir()
    assert said().startswith("DATA/other: there is no system.md: ")
    (tmp_path / "data" / "other").rmdir()
    (tmp_path / "data" / "a.png").write_bytes(b"")
    assert said().startswith("DATA/a.png: neither a set of instructions nor part of one")


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (b"{", "broken JSON at character 3"),
        (b"\xff", "byte 1 of the line is not UTF-8"),
        ([1], 'the item is no object; write {"input": ..., "target": ...}'),
        ({"input": "a"}, "the item has no target; write the answer"),
        ({"input": "a", "target": "b", "targets": ["c"]}, "the item has both target and targets; leave one out"),
        ({"input": "a", "target": 7}, "target is no text; write the answer, or several as a list of targets"),
        ({"input": "a", "target": ["b"]}, "target is no text"),
        ({"input": "a", "targets": "b"}, "targets is a text; write a list of answers"),
        ({"input": "a", "target": " "}, "the target is empty"),
        ({"target": "b"}, "the item has no input; write the text that its target answers"),
        ({"input": 7, "target": "b"}, "input is no text; write a text or a list of parts"),
        ({"input": None, "target": "b"}, "input is no text"),
        ({"inputs": "a", "target": "b"}, "the item has the unknown key 'inputs'; did you mean input?"),
        ({"messages": [], "target": "b"}, "the item has the unknown key 'messages'"),
        ({"input": "a", "image": "x.png", "images": [], "target": "b"}, "the item has both image and images"),
        ({"input": "a", "images": "x.png", "target": "b"}, "images is no list; write a list of paths, or one path"),
        ({"input": "a", "image": 7, "target": "b"}, r"messages\[1\].content\[0\].image is a number"),
        ({"input": "a", "image": "none.png", "target": "b"}, "image 'none.png': no such file below"),
        ({"input": "a", "image": "../other/a.png", "target": "b"}, "write a path below the data file's folder"),
        ({"input": "a", "image": "away.png", "target": "b"}, "leads outside the data file's folder"),
        ({"input": "a", "target": "b", "id": "taken"}, "the id 'taken' is already that of .*a/items.jsonl:1"),
    ],
)
def test_a_bad_item_is_one_line_with_file_and_line_and_alone(tmp_path: Path, bad: Any, complaint: str) -> None:
    chats.draw(tmp_path / "data" / "other" / "a.png")
    made(tmp_path / "data" / "a", SORT, [item(1, id="taken")])
    made(tmp_path / "data" / "other", COUNT, [item(4)])
    folder = made(tmp_path / "data" / "b", COUNT, [item(2), bad, item(3)])
    (folder / "away.png").symlink_to(tmp_path / "data" / "other" / "a.png")
    with pytest.raises(UserError, match=rf"^{folder}/items.jsonl:2: .*{complaint}") as caught:
        load(tmp_path / "data")
    found = load(tmp_path / "data", on_bad="skip")
    assert found.skipped == [str(caught.value)]
    assert [example.answer for example in found] == [f"It is {n}." for n in (1, 2, 3, 4)]


def test_a_folder_of_prompts_is_data_for_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path / "my data's <b>", SORT, [item(n) for n in range(3)])
    with pytest.raises(SystemExit) as ended:
        console.run(cli.app, ["plan", str(folder)])
    assert ended.value.code == 2
    assert f"error: {folder} is data: say for which model" in capsys.readouterr().err
    model = tmp_path / "model"
    chats.config().save_pretrained(model)
    chats.processor().save_pretrained(model)
    with pytest.raises(SystemExit) as ended:
        console.run(cli.app, ["plan", str(folder), "--model", str(model), "--json"])
    captured = capsys.readouterr()
    assert (ended.value.code, captured.err) == (0, "")
    document = json.loads(captured.out.splitlines()[-1])
    assert document["longest"][0]["source"].startswith(f"{folder}/items.jsonl:")
    assert document["shared"]["largest"][0]["examples"] == 3


def test_a_folder_of_prompts_is_planned_and_every_change_of_it_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, rules in (("a", SORT), ("b", COUNT)):
        made(tmp_path / "data" / name, rules, [item(n) for n in range(4)])
    config = configured(tmp_path, tmp_path / "data")
    cli.plan_command(tmp_path / "c.yaml", as_json=True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["examples"] == 8
    lengths.load(config)
    for change in (
        lambda: (tmp_path / "data" / "b" / "system.md").write_text("Another rule."),
        lambda: made(tmp_path / "data" / "b", "Another rule.", [item(n) for n in range(3)]),
        lambda: (tmp_path / "data" / "b").rename(tmp_path / "data" / "c"),
    ):
        change()
        with pytest.raises(UserError, match=r"made for something else: data "):
            lengths.load(config)
        cli.plan_command(tmp_path / "c.yaml")
        lengths.load(config)


@pytest.mark.parametrize("place", ["a set", "an image", "the folder"])
def test_a_name_that_is_not_utf8_is_one_line(tmp_path: Path, place: str) -> None:
    """It stands in the source of every example, which predictions name."""
    hostile = os.fsdecode(b"na\xefve")
    folder = tmp_path / (hostile if place == "the folder" else "data")
    made(folder / (hostile if place == "a set" else "set"), SORT, [item(1)])
    if place == "an image":
        chats.draw(tmp_path / "a.png").rename(folder / "set" / f"{hostile}.png")
    with pytest.raises(UserError, match=r"na\\udcefve(\.png)?: the name is not UTF-8; give it another one") as caught:
        load(folder)
    assert str(caught.value).isascii()
