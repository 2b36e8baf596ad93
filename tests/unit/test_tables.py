"""Parquet files, folders of them, and folders that `datasets` has saved: the same examples as from chat JSONL."""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.errors import UserError
from prefix_train import cli, lengths, tables
from prefix_train.data import Examples, load_examples
from prefix_train.render import Renderer
from tests import chats
from tests.chats import configured, load, picture, row, same, text

SYSTEMS = ["You sort things. " * 10, "You count things, and nothing else. " * 10]


def records(count: int = 7) -> list[dict[str, Any]]:
    """Rows under two system prompts."""
    return [row(f"Which is {n}?", f"It is {n}.", SYSTEMS[n % 2], id=f"row {n}") for n in range(count)]


def parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def saved(folder: Path, parts: list[list[dict[str, Any]]]) -> Path:
    """A folder as `datasets.Dataset.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05}-of-{len(parts):05}.arrow" for n in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.fixture
def plain(tmp_path: Path) -> Examples:
    return load(chats.write(tmp_path / "plain.jsonl", records()))


@pytest.mark.parametrize("kept", [1, 1 << 20], ids=["read again", "kept"])
@pytest.mark.parametrize("form", ["file", "folder", "saved"])
def test_tables_hold_the_examples_that_jsonl_holds(tmp_path: Path, plain: Examples, form: str, kept: int) -> None:
    rows, place = records(), tmp_path / "table"
    if form == "file":
        path = parquet(tmp_path / "d.parquet", rows, row_group_size=2)
        sources = [f"{path}:{n}" for n in range(1, 8)]
    elif form == "folder":
        names = [place / "data" / f"train-0000{n}-of-00002.parquet" for n in range(2)]
        parquet(names[0], rows[:4], row_group_size=3)
        parquet(names[1], rows[4:])
        path, sources = place, [*(f"{names[0]}:{n}" for n in range(1, 5)), *(f"{names[1]}:{n}" for n in range(1, 4))]
    else:
        path = saved(place, [rows[:3], rows[3:]])
        names = [place / f"data-0000{n}-of-00002.arrow" for n in range(2)]
        sources = [*(f"{names[0]}:{n}" for n in range(1, 4)), *(f"{names[1]}:{n}" for n in range(1, 5))]
    examples = load(path, kept_tokens=kept)
    assert [example.source for example in examples] == sources
    assert [example.id for example in examples] == [f"row {n}" for n in range(7)]
    for index in (6, 0, 5, 3, 2, 4, 1, 0):
        assert same(examples[index], plain[index])


def test_two_system_prompts_in_one_file_are_two_shared_beginnings(tmp_path: Path, plain: Examples) -> None:
    index = lengths.build(configured(tmp_path, tmp_path / "plain.jsonl"), plain)
    roots = np.flatnonzero(np.bincount(index.forest.parent[index.forest.parent >= 0]) > 1)
    below = {frozenset(e for e in range(7) if root in index.forest.path(e)) for root in roots.tolist()}
    assert {frozenset({0, 2, 4, 6}), frozenset({1, 3, 5})} <= below


def test_images_as_bytes_paths_data_uris_and_in_a_column_are_the_same(tmp_path: Path) -> None:
    files = [chats.draw(tmp_path / f"{n}.png", 32 + 16 * n, seed=n) for n in range(2)]
    given = [file.read_bytes() for file in files]
    uris = [f"data:image/png;base64,{base64.b64encode(content).decode()}" for content in given]

    def records(images: list[Any]) -> list[dict[str, Any]]:
        return [row([picture(image), text(f"{n}?"), picture(images[0])]) for n, image in enumerate(images)]

    hole = {"type": "image", "text": None, "image": None}
    column = [
        row([hole, {**hole, "type": "text", "text": f"{n}?"}, hole], images=[image, {"bytes": given[0], "path": None}])
        for n, image in enumerate([{"bytes": given[0], "path": "x"}, {"bytes": None, "path": "1.png"}])
    ]
    for message in (message for one in column for message in one["messages"]):
        if message["role"] == "assistant":
            message["content"] = [{"type": "text", "text": message["content"], "image": None}]
    holes = [[{"type": "image"}, text(f"{n}?"), {"type": "image"}] for n in range(2)]
    every = {
        "paths": load(chats.write(tmp_path / "paths.jsonl", records(["0.png", "1.png"]))),
        "uris": load(chats.write(tmp_path / "uris.jsonl", records(uris)), kept_tokens=1),
        "holes": load(chats.write(tmp_path / "h.jsonl", [row(holes[n], images=[uris[n], "0.png"]) for n in range(2)])),
        "column": load(parquet(tmp_path / "column.parquet", column), kept_tokens=1),
    }
    for name, examples in every.items():
        assert len(examples) == 2, name
        for index in (1, 0):
            assert same(examples[index], every["paths"][index]), name


def test_embedded_images_are_read_again_from_their_row(tmp_path: Path) -> None:
    rows = []
    for n in range(3):
        content = chats.draw(tmp_path / "x.png", seed=n).read_bytes()
        rows.append(row([picture(f"data:image/png;base64,{base64.b64encode(content).decode()}")]))
    path = chats.write(tmp_path / "d.jsonl", rows)
    renderer = chats.fresh_renderer()
    renderer.images._cache_bytes = 1
    examples = load_examples(path, renderer, 4096)
    first = examples[0].images[0].load().copy()
    examples[2].images[0].load()
    assert np.array_equal(examples[0].images[0].load(), first)
    path.write_bytes(path.read_bytes().replace(b"A seven.", b"An eight", 1))
    examples[2].images[0].load()
    with pytest.raises(UserError, match=rf"^{path}:1: the row has changed since the data was read"):
        examples[0].images[0].load()


@pytest.mark.parametrize(
    ("uri", "complaint"),
    [
        ("data:,hello", "image 1 of the row is no data URI of an image in base64; write data:image/png"),
        ("data:text/plain;base64,aGVsbG8=", "image 1 of the row is no data URI of an image in base64"),
        ("data:application/pdf;base64,JVBERi0=", "image 1 of the row is no data URI of an image in base64"),
        ("data:image/png,hello", "image 1 of the row is no data URI of an image in base64"),
        ("data:image/png;base64,????", "image 1 of the row is broken base64"),
        ("data:image/png;base64,aGVsbG8=", "image 1 of the row is of no known format; write one of PNG"),
    ],
)
def test_a_bad_data_uri_is_one_line(tmp_path: Path, uri: str, complaint: str) -> None:
    path = chats.write(tmp_path / "d.jsonl", [row([picture(uri)])])
    with pytest.raises(UserError, match=rf"^{path}:1: {complaint}") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("images", [["0.png"], ["0.png"] * 3, "0.png"], ids=["fewer", "more", "no list"])
def test_images_must_be_as_many_as_their_parts(tmp_path: Path, images: Any) -> None:
    chats.draw(tmp_path / "0.png")
    path = chats.write(tmp_path / "d.jsonl", [row([{"type": "image"}, {"type": "image"}], images=images)])
    with pytest.raises(UserError, match=rf"^{path}:1: (\d images? for 2 parts of the type image|images is a text)"):
        load(path)


def test_tool_calls_come_from_tables_without_the_nulls_that_those_add(tmp_path: Path) -> None:
    function = {"name": "weather", "arguments": {"city": "Bern"}}
    other = {"name": "clock", "arguments": {"zone": "UTC"}}
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Now?"},
                {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": one}]},
            ]
        }
        for one in (function, other)
    ]
    tokenizer = chats.processor(chats.TOOLS).tokenizer
    found = load_examples(parquet(tmp_path / "d.parquet", rows), Renderer(tokenizer, chats.text_config()), 500)
    for example, one in zip(found, (function, other), strict=True):
        assert json.dumps(one["arguments"]) in example.answer
        assert "null" not in example.answer


def test_a_bad_row_is_one_line_with_file_and_row(tmp_path: Path) -> None:
    rows = records(3)
    rows[1]["messages"][-1]["content"] = " "
    path = parquet(tmp_path / "d.parquet", rows, row_group_size=1)
    with pytest.raises(UserError, match=rf"^{path}:2: the target is empty"):
        load(path)
    assert len(load(path, on_bad="skip")) == 2


def one_message(content: pa.Array) -> pa.Table:
    """A table of one row with one question, whose content is of any type, and its answer."""
    question = pa.StructArray.from_arrays([pa.array(["user"]), content], ["role", "content"])
    messages = pa.ListArray.from_arrays(pa.array([0, 1]), question)
    return pa.table({"messages": messages, "targets": pa.array([["yes"]])})


WRONG = {
    "bytes as text": (pa.array([b"abc"]), "content holds bytes; write a text, or an image as bytes under image"),
    "a number": (pa.array([7]), r"messages\[0\].content is a number; write a text"),
    "a time": (
        pa.array([0], pa.timestamp("s")),
        r"datetime.datetime\(1970, 1, 1, 0, 0\) is no text, number, list or obj",
    ),
    "a decimal": (pa.array([7], pa.decimal128(5, 2)), r"Decimal\('7.00'\) is no text"),
    "not UTF-8": (
        pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff")),
        "a text is not UTF-8; write it as UTF-8",
    ),
    "a number that is none": (pa.array([float("nan")]), "NaN is no JSON value"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_type_within_messages_is_one_line_and_alone(tmp_path: Path, case: str) -> None:
    content, complaint = WRONG[case]
    path = tmp_path / "d.parquet"
    bad = one_message(content)
    pq.write_table(bad, path)
    with pytest.raises(UserError, match=rf"^{path}:1( target 1)?: {complaint}") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    if content.type == pa.string():
        good = one_message(pa.array(["a"]))
        pq.write_table(pa.concat_tables([good, bad, good]), path)
        found = load(path, on_bad="skip")
        assert [example.source for example in found] == [f"{path}:1 target 1", f"{path}:3 target 1"]
        assert found.skipped[0].startswith(f"{path}:2: a text is not UTF-8")


@pytest.mark.parametrize(
    ("column", "complaint"),
    [
        (pa.array([1]), "the row has a number"),
        (pa.array(['[{"role": "user"}]']), "the row has a text"),
        (pa.array([["user"]]), r"messages\[0\] is a text"),
        (pa.array([None], pa.list_(pa.string())), "the row has no messages"),
        (pa.array([{"role": "user", "content": "a"}]), "the row has an object"),
    ],
)
def test_a_wrong_type_of_column_is_one_line(tmp_path: Path, column: pa.Array, complaint: str) -> None:
    pq.write_table(pa.table({"messages": column}), tmp_path / "d.parquet")
    with pytest.raises(UserError, match=rf"^{tmp_path}/d.parquet:1: {complaint}"):
        load(tmp_path / "d.parquet")


def test_several_targets_come_from_tables_as_from_jsonl(tmp_path: Path) -> None:
    rows = [
        {"messages": row(f"{n}?")["messages"][:1], "targets": ["yes", "no"][: 1 + n % 2], "id": n} for n in range(4)
    ]
    named = [{**one, "id": str(one["id"])} for one in rows]
    plain = load(chats.write(tmp_path / "d.jsonl", named))
    found = load(parquet(tmp_path / "d.parquet", rows), kept_tokens=1)
    assert [example.id for example in found] == ["0/1", "1/1", "1/2", "2/1", "3/1", "3/2"]
    assert all(same(one, other) for one, other in zip(found, plain, strict=True))


def test_a_damaged_table_is_one_line(tmp_path: Path) -> None:
    path = parquet(tmp_path / "d.parquet", records(40))
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[: len(whole) // 2], whole[:4] + bytes(200) + whole[204:]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"^{path}: not a readable table: ") as caught:
            load(path)
        assert "\n" not in str(caught.value)
    folder = saved(tmp_path / "saved", [records()])
    (folder / "data-00000-of-00001.arrow").write_bytes(b"\0" * 10)
    with pytest.raises(UserError, match=r"^.*/data-00000-of-00001.arrow: not a readable table: "):
        load(folder)


def test_what_is_no_table_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(path: Path) -> str:
        with pytest.raises(UserError) as caught:
            load(path)
        assert "\n" not in str(caught.value)
        return str(caught.value).removeprefix(str(path))

    (tmp_path / "text.parquet").write_text("hello")
    assert said(tmp_path / "text.parquet").startswith(": not a readable table: ")
    assert said(tmp_path / "none.parquet").startswith(": not a readable table: ")
    assert said(parquet(tmp_path / "other.parquet", [{"text": "a"}])) == (
        ": the table has no column messages; it has text"
    )
    empty = pa.table({"messages": pa.array([], pa.list_(pa.string()))})
    pq.write_table(empty, tmp_path / "empty.parquet")
    assert said(tmp_path / "empty.parquet") == ": the table has no rows"
    for split in ("train", "test"):
        parquet(tmp_path / "hub" / f"{split}-00000-of-00001.parquet", records())
        saved(tmp_path / "dict" / split, [records()])
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert said(tmp_path / "hub").startswith(" holds the splits test, train: name one file")
    assert said(tmp_path / "dict") == f" holds the splits test, train: name one, as in {tmp_path / 'dict' / 'train'}"
    assert len(load(tmp_path / "dict" / "test")) == 7
    (tmp_path / "dict" / "test" / "state.json").write_text("[]")
    assert "is not what `datasets` saves" in said(tmp_path / "dict" / "test")
    (tmp_path / "dict" / "test" / "state.json").write_text('{"_data_files": [], "_indices_data_files": [{}]}')
    assert said(tmp_path / "dict" / "test").startswith(": an old version of `datasets` saved a selection of rows here")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert said(tmp_path / "other.parquet") == ": reading tables needs pyarrow: pip install pyarrow"


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (("train/0000.parquet", "test/0000.parquet"), "test, train"),
        (("default/train/0000.parquet", "default/val/0000.parquet"), "train, validation"),
        (("train.parquet", "my_dev_set.parquet"), "train, validation"),
        (("data/train-00000-of-00001.parquet", "data/Evaluation.parquet"), "test, train"),
    ],
)
def test_splits_are_told_apart_by_names_of_files_and_folders(names: Sequence[str], splits: str, tmp_path: Path) -> None:
    for name in names:
        parquet(tmp_path / name, records())
    with pytest.raises(UserError, match=rf"^{tmp_path} holds the splits {splits}: name one file, or a folder"):
        load(tmp_path)


def test_a_folder_of_one_split_is_read_whole(tmp_path: Path) -> None:
    rows = records()
    parquet(tmp_path / "train" / "a.parquet", rows[:3])
    parquet(tmp_path / "train" / "b.parquet", rows[3:5])
    parquet(tmp_path / "trained-on-latest.parquet", rows[5:])
    assert len(load(tmp_path)) == len(rows)


def test_a_table_can_be_read_by_several_threads(tmp_path: Path) -> None:
    table = tables.Table(parquet(tmp_path / "d.parquet", records(40), row_group_size=3))
    lines = list(table)
    wrong: list[int] = []

    def read(seed: int) -> None:
        for n in np.random.default_rng(seed).integers(0, 40, 60).tolist():
            if table.line("", n, 0).content != lines[n].content:
                wrong.append(n)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_folder_is_planned_and_its_change_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "table"
    parquet(folder / "a.parquet", records()[:4])
    parquet(folder / "b.parquet", records()[4:])
    config = configured(tmp_path, folder)
    cli.plan_command(tmp_path / "c.yaml", as_json=True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["examples"] == 7
    assert lengths.load(config).sources[4] == f"{folder / 'b.parquet'}:1"
    parquet(folder / "b.parquet", records()[5:])
    with pytest.raises(UserError, match=r"made for something else: data "):
        lengths.load(config)


def test_a_name_that_is_not_utf8_is_one_line(tmp_path: Path) -> None:
    hostile = os.fsdecode(b"na\xefve.parquet")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / hostile, tmp_path / "folder" / hostile):
        parquet(tmp_path / "plain.parquet", records()).rename(path)
    for path in (tmp_path / hostile, tmp_path / "folder"):
        with pytest.raises(UserError, match=r"na\\udcefve\.parquet: the name is not UTF-8; give it another one"):
            tables.Table(path)
