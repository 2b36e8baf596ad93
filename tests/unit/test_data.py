"""Reading chat JSONL: lines, rows, what is skipped, and examples that are rendered again when they are needed."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from configs.errors import UserError
from prefix_train import rows
from prefix_train.data import load_examples, read_jsonl
from tests import chats
from tests.chats import picture, row, text


def test_rows_come_with_file_and_line(tmp_path: Path) -> None:
    path = chats.write(tmp_path / "d.jsonl", [row("a"), b"", b"   ", row("b", id="second", meta={"label": [1, None]})])
    rows = list(read_jsonl(path))
    assert [source for source, _ in rows] == [f"{path}:1", f"{path}:4"]
    assert rows[1][1]["id"] == "second"


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("last", [True, False], ids=["ended", "open"])
def test_line_ends_and_byte_order_marks_change_nothing(tmp_path: Path, end: bytes, mark: bytes, last: bool) -> None:
    lines = [json.dumps(row(question)).encode() for question in ("one", "two")]
    path = tmp_path / "d.jsonl"
    path.write_bytes(mark + end.join(lines) + (end if last else b""))
    assert [record for _, record in read_jsonl(path)] == [row("one"), row("two")]
    examples = load_examples(path, chats.renderer(), 1000, kept_tokens=1)
    plain = load_examples(chats.write(tmp_path / "plain.jsonl", lines), chats.renderer(), 1000)
    for index in (0, 1, 0):
        assert np.array_equal(examples[index].ids, plain[index].ids)


def test_a_line_separator_within_a_text_ends_no_row(tmp_path: Path) -> None:
    line = json.dumps(row("one\u2028two\x85three"), ensure_ascii=False).encode()
    assert [record for _, record in read_jsonl(chats.write(tmp_path / "d.jsonl", [line]))] == [
        row("one\u2028two\x85three")
    ]


def test_examples_keep_the_file_s_order_and_names(tmp_path: Path) -> None:
    path = chats.write(tmp_path / "d.jsonl", [row("a", id="first"), row("b")])
    examples = load_examples(path, chats.renderer(), 1000)
    assert [example.id for example in examples] == ["first", f"{path}:2"]
    assert [example.source for example in examples] == [f"{path}:1", f"{path}:2"]
    assert examples[-1].id == examples[0:2][1].id == f"{path}:2"
    assert len(examples) == 2
    with pytest.raises(IndexError):
        examples[2]


def test_skipping_leaves_bad_rows_out_and_lists_them(tmp_path: Path) -> None:
    good = [row("a", id="a"), row("b", id="b"), row("c", id="c")]
    path = chats.write(tmp_path / "d.jsonl", [good[0], b"{", row("x", id="a"), good[1], row("", ""), good[2]])
    examples = load_examples(path, chats.renderer(), 1000, on_bad="skip")
    assert [example.id for example in examples] == ["a", "b", "c"]
    assert [line.split(": ")[0] for line in examples.skipped] == [f"{path}:{line}" for line in (2, 3, 5)]
    with pytest.raises(UserError, match=rf"^{path}:2: broken JSON at character 3"):
        load_examples(path, chats.renderer(), 1000)


def test_a_name_is_free_again_when_its_row_was_skipped(tmp_path: Path) -> None:
    path = chats.write(tmp_path / "d.jsonl", [row("a", "", id="a"), row("a", id="a")])
    examples = load_examples(path, chats.renderer(), 1000, on_bad="skip")
    assert [example.source for example in examples] == [f"{path}:2"]


def test_a_file_without_a_good_row_is_an_error_even_when_skipping(tmp_path: Path) -> None:
    path = chats.write(tmp_path / "d.jsonl", [b"{", row("a", "")])
    with pytest.raises(UserError, match=rf"^{path}: no good example among 2 rows: {path}:1: "):
        load_examples(path, chats.renderer(), 1000, on_bad="skip")


def test_a_key_that_is_null_counts_as_left_out(tmp_path: Path) -> None:
    chats.draw(tmp_path / "0.png")
    look = [{"type": "image", "text": None, "image": None}, {"type": "text", "text": "Read it.", "image": None}]
    turns = [{"role": "user", "content": look, "name": None}, {"role": "assistant", "content": "7", "refusal": None}]
    full = {"id": "a", "messages": turns, "images": ["0.png"], "targets": None, "prompt": None}
    path = chats.write(tmp_path / "d.jsonl", [full])
    short = [{"type": "image", "image": "0.png"}, {"type": "text", "text": "Read it."}]
    other = chats.write(tmp_path / "e.jsonl", [row(short, "7", id="a")])
    one, two = (load_examples(each, chats.renderer(), 1000)[0] for each in (path, other))
    assert len(one.images) == 1
    assert np.array_equal(one.keys, two.keys)
    assert np.array_equal(one.target, two.target)


def test_a_compressed_file_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(UserError, match=rf"^{path}: the file is compressed; unpack it"):
        load_examples(path, chats.renderer(), 1000)


def test_the_cap_is_the_longest_example_accepted(tmp_path: Path) -> None:
    path = chats.write(tmp_path / "d.jsonl", [row()])
    length = len(load_examples(path, chats.renderer(), 1000)[0].ids)
    assert len(load_examples(path, chats.renderer(), length)) == 1
    with pytest.raises(
        UserError, match=rf"^{path}:1: the example has {length} tokens, more than the cap of {length - 1}"
    ):
        load_examples(path, chats.renderer(), length - 1)


def test_examples_out_of_memory_are_rendered_again_alike(tmp_path: Path) -> None:
    chats.draw(tmp_path / "a.png")
    rows = [row([picture("a.png"), text(f"{index}?")], system="Be brief.") for index in range(6)]
    path = chats.write(tmp_path / "d.jsonl", rows)
    kept, renderer = load_examples(path, chats.renderer(), 1000), chats.fresh_renderer()
    examples = load_examples(path, renderer, 1000, kept_tokens=2 * len(kept[0].ids))
    rendered = 0
    stock = renderer.render

    def counting(*args: object) -> object:
        nonlocal rendered
        rendered += 1
        return stock(*args)

    renderer.render = counting
    for index in (5, 4, 5, 0, 1, 0, 5):
        mine, other = examples[index], kept[index]
        for name in ("ids", "keys", "position_ids", "target"):
            assert np.array_equal(getattr(mine, name), getattr(other, name))
        assert (mine.id, mine.source, mine.answer) == (other.id, other.source, other.answer)
        assert [image.digest for image in mine.images] == [image.digest for image in other.images]
    assert rendered == 3


def test_examples_can_be_read_by_several_threads(tmp_path: Path) -> None:
    path = chats.write(tmp_path / "d.jsonl", [row(f"{index}?") for index in range(20)])
    examples = load_examples(path, chats.renderer(), 1000, kept_tokens=100)
    lengths = [len(example.ids) for example in examples]
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.append([len(example.ids) for example in examples])) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [lengths] * 4


def test_a_row_that_changes_while_it_is_used_is_an_error(tmp_path: Path) -> None:
    path = chats.write(tmp_path / "d.jsonl", [row("one"), row("two")])
    examples = load_examples(path, chats.renderer(), 1000, kept_tokens=1)
    path.write_bytes(path.read_bytes().replace(b"one", b"two"))
    with pytest.raises(UserError, match=rf"^{path}:1: the row has changed since the data was read"):
        examples[0]


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 100)
    path = tmp_path / "d.jsonl"
    path.write_bytes(b"x" * 1000)
    with pytest.raises(UserError, match=rf"^{path}:1: the line is longer than 100 bytes"):
        list(read_jsonl(path))
