"""The length index: it comes back as it was written, holds for one state of everything, and unpickles nothing."""

from __future__ import annotations

import ast
import io
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.errors import UserError
from configs.schema import Config, DataConfig, ModelConfig, PackConfig, TrainConfig
from prefix_train import lengths
from prefix_train.lengths import LengthIndex
from prefix_train.plan_summary import describe

PACKAGE = Path(lengths.__file__).parent


@dataclass(frozen=True)
class Row:
    source: str
    keys: np.ndarray
    target: np.ndarray


def rows(count: int = 40, prefix: int = 50) -> list[Row]:
    return [
        Row(f"train.jsonl:{i + 1}", np.r_[np.ones(prefix, int), -i, i], np.arange(prefix + 2) > prefix)
        for i in range(count)
    ]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (model / name).write_text("{}")
    (model / "config.json").write_text('{"model_type": "llama"}')
    data = tmp_path / "train.jsonl"
    data.write_text("rows\n" * 40)
    return Config(
        run_root=str(tmp_path / "runs"),
        cluster="local",
        model=ModelConfig(path=str(model)),
        data=DataConfig(train=str(data)),
        pack=PackConfig(max_positions=128, packs_per_update=2),
        train=TrainConfig(epochs=1),
    )


@pytest.fixture
def written(config: Config) -> LengthIndex:
    index = lengths.build(config, rows(), ["train.jsonl:9: no target"])
    lengths.write(lengths.index_path(config), index)
    return index


def test_an_index_comes_back_as_it_was_written(config: Config, written: LengthIndex) -> None:
    index = lengths.load(config)
    assert index.key == written.key
    assert (index.sources, index.skipped) == (written.sources, written.skipped)
    assert index.targets.tolist() == [1] * 40
    assert index.lengths.tolist() == [52] * 40
    assert all(index.forest.path(i) == written.forest.path(i) for i in range(40))
    assert lengths.run_plan(config, index).epoch(0).digest == lengths.run_plan(config, written).epoch(0).digest
    assert "train.jsonl:1" in describe(lengths.run_plan(config, index).epoch(0))


def test_the_largest_pack_is_what_the_budget_is_made_for(config: Config, written: LengthIndex) -> None:
    packs = list(lengths.run_plan(config, written).epoch(0).packs)
    shape = lengths.largest_pack(config, written)
    assert shape.positions == max(pack.positions for pack in packs) == 128
    assert (shape.segments, shape.inner, shape.rows) == (40, 1, 39)


def appended(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("a") as stream:
            stream.write(" ")

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (appended("train.jsonl"), "data"),
        (appended("model/config.json"), "model"),
        (appended("model/tokenizer.json"), "template"),
        (appended("model/chat_template.jinja"), "template"),
        (lambda folder: (folder / "model" / "preprocessor_config.json").write_text("{}"), "template"),
    ],
)
def test_an_index_of_other_files_is_refused_by_name(
    config: Config, written: LengthIndex, tmp_path: Path, change: Callable[[Path], Any], named: str
) -> None:
    change(tmp_path)
    with pytest.raises(UserError, match=rf"made for something else: {named} \(\w+ then, \w+ now\): run"):
        lengths.load(config)


def test_each_model_and_each_set_of_options_has_an_index_of_its_own(config: Config, written: LengthIndex) -> None:
    kept = {lengths.index_path(config): written}
    for change in (
        {"pack": replace(config.pack, min_shared=17)},
        {"data": replace(config.data, targets="all")},
        {"model": ModelConfig(build={"model_type": "llama"})},
    ):
        other = replace(config, **change)
        assert not lengths.exists(other)
        with pytest.raises(UserError, match="there is no length index at"):
            lengths.load(other)
        kept[lengths.index_path(other)] = lengths.build(other, rows())
        lengths.write(lengths.index_path(other), kept[lengths.index_path(other)])
        assert lengths.load(other).key == kept[lengths.index_path(other)].key
    assert len(kept) == 4
    assert lengths.load(config).key == written.key


def resized(config: Config, positions: int) -> Config:
    return replace(config, pack=replace(config.pack, max_positions=positions))


@pytest.mark.parametrize("positions", [52, 129, 1 << 20])
def test_packs_of_any_size_that_hold_every_example_use_one_index(
    config: Config, written: LengthIndex, positions: int
) -> None:
    other = resized(config, positions)
    index = lengths.load(other)
    assert lengths.largest_pack(other, index).positions <= positions
    assert lengths.run_plan(other, index).epoch(0).digest == (
        lengths.run_plan(other, lengths.build(other, rows())).epoch(0).digest
    )


def test_an_index_with_an_example_that_no_pack_holds_is_refused_by_name(config: Config, written: LengthIndex) -> None:
    limited = replace(config, data=replace(config.data, max_example_tokens=51))
    for other in (resized(config, 51), limited):
        with pytest.raises(UserError, match=r"train\.jsonl:1 has 52 tokens, and 51 are accepted: raise pack\.max_posi"):
            lengths.load(other)


def test_a_plan_that_leaves_long_examples_out_breaks_no_other_and_none_breaks_it(config: Config) -> None:
    """In either order, and also after the data has changed and only one of the two was planned again."""
    config = replace(config, data=replace(config.data, on_bad_example="skip"))
    small, extra = resized(config, 60), [*rows(), *rows(2, prefix=90)]

    def plan(given: Config, some: list[Row]) -> None:
        kept = [row for row in some if len(row.keys) <= given.pack.max_positions]
        cut = len(kept) < len(some)
        index = lengths.build(given, kept, ["too long"] * (len(some) - len(kept)), cut=cut)
        lengths.write(lengths.index_path(given, cut=cut), index)

    for order in ((small, config), (config, small)):
        for given in order:
            plan(given, extra)
        assert [len(lengths.load(given).sources) for given in (small, config)] == [40, 42]
    with pytest.raises(UserError, match=r"train\.jsonl:1 has 92 tokens, and 61 are accepted"):
        lengths.load(resized(config, 61))
    with Path(config.data.train).open("a") as stream:
        stream.write("rows\n")
    plan(small, extra)
    assert len(lengths.load(small).sources) == 40
    with pytest.raises(UserError, match=r"made for something else: data \("):
        lengths.load(config)


def test_an_index_of_other_code_is_refused_by_name(
    config: Config, written: LengthIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "RENDERER", (*lengths.RENDERER, "layout"))
    with pytest.raises(UserError, match=r"something else: renderer \("):
        lengths.load(config)


def test_what_decides_nothing_changes_nothing(config: Config, written: LengthIndex, tmp_path: Path) -> None:
    appended("model/generation_config.json")(tmp_path)
    (tmp_path / "model" / "model.safetensors").write_text("weights")
    os.utime(tmp_path / "train.jsonl")
    assert lengths.load(replace(config, seed=9)).key == written.key


def test_an_unchanged_file_is_not_read_again(
    config: Config, written: LengthIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    hash_of = lengths._file_sha256
    monkeypatch.setattr(lengths, "_file_sha256", lambda path: read.append(path.name) or hash_of(path))
    lengths.load(config)
    assert "train.jsonl" not in read
    os.utime(config.data.train)
    lengths.load(config)
    assert "train.jsonl" in read


def test_a_changed_image_is_found_example_by_example(written: LengthIndex) -> None:
    for place, row in enumerate(rows()):
        written.check(place, row.keys)
    changed = rows()[3].keys.copy()
    changed[-2] -= 1
    with pytest.raises(UserError, match=r"train\.jsonl:4: the example has changed"):
        written.check(3, changed)


def test_a_missing_index_or_data_file_is_named(config: Config, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no length index at .*train-.*npz: make it with"):
        lengths.load(config)
    with pytest.raises(UserError, match=r"nowhere\.jsonl: the data file cannot be read"):
        lengths.build(config, rows(), data=tmp_path / "nowhere.jsonl")
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(UserError, match=r"has no config\.json"):
        lengths.build(config, rows())


def test_files_of_one_name_in_two_places_have_their_own_index(config: Config, tmp_path: Path) -> None:
    other = tmp_path / "other" / "train.jsonl"
    assert lengths.index_path(config) != lengths.index_path(config, other)
    assert lengths.index_path(config, other).parent == tmp_path / "runs" / "lengths"


def damaged(path: Path) -> dict[str, bytes]:
    whole = path.read_bytes()
    parts = dict(np.load(path, allow_pickle=False))
    return {
        "truncated": whole[: len(whole) // 2],
        "empty": b"",
        "text": b"{}",
        "no npz": saved(lambda stream: np.save(stream, np.arange(3))),
        "a table less": saved(lambda stream: np.savez(stream, **{k: v for k, v in parts.items() if k != "last"})),
        "floats": saved(lambda stream: np.savez(stream, **parts | {"length": parts["length"].astype(float)})),
        "no forest": saved(lambda stream: np.savez(stream, **parts | {"parent": parts["parent"] + 1000})),
        "other sizes": saved(lambda stream: np.savez(stream, **parts | {"targets": parts["targets"][1:]})),
        "no words": saved(lambda stream: np.savez(stream, **parts | {"words": np.frombuffer(b"[1]", np.uint8)})),
        "deep words": saved(
            lambda stream: np.savez(stream, **parts | {"words": np.frombuffer(b"[" * 100_000, np.uint8)})
        ),
    }


def saved(save: Callable[[Any], None]) -> bytes:
    stream = io.BytesIO()
    save(stream)
    return stream.getvalue()


def test_damaged_and_foreign_files_are_one_clear_line(config: Config, written: LengthIndex) -> None:
    path = lengths.index_path(config)
    for what, content in damaged(path).items():
        path.write_bytes(content)
        with pytest.raises(UserError, match="is not a length index") as caught:
            lengths.load(config)
        assert "\n" not in str(caught.value), what


class Planted:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("unpickled"),))


def test_nothing_is_unpickled(
    config: Config, written: LengthIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = lengths.index_path(config)
    parts = dict(np.load(path, allow_pickle=False))
    objects = np.array([Planted()], dtype=object)
    for content in (saved(lambda s: np.savez(s, **parts | {"words": objects})), pickle.dumps(Planted())):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is not a length index"):
            lengths.load(config)
    assert not (tmp_path / "unpickled").exists()


def test_the_code_s_version_covers_all_that_rendering_imports() -> None:
    def imports(module: str) -> set[str]:
        found = set()
        for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "prefix_train":
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prefix_train."):
                found.add(str(node.module).removeprefix("prefix_train."))
        return found

    seen: set[str] = set()
    todo = {"data", "tree"}
    while todo:
        seen.add(module := todo.pop())
        todo |= imports(module) - seen
    assert seen == set(lengths.RENDERER)
    builder = [file for pattern in lengths.BUILDER for file in PACKAGE.glob(pattern)]
    assert {"tiny.py", "chat_template.jinja", "merges.txt"} <= {file.name for file in builder}


def test_an_index_is_read_and_planned_in_under_300_ms(config: Config) -> None:
    config = replace(config, pack=replace(config.pack, max_positions=2600))
    lengths.write(lengths.index_path(config), lengths.build(config, rows(1_800, 1_500)))
    seconds: list[float] = []
    while len(seconds) < 3 and min(seconds, default=1) >= 0.3:
        begin = time.process_time()
        text = describe(lengths.run_plan(config, lengths.load(config)).epoch(0))
        seconds.append(time.process_time() - begin)
    assert min(seconds) < 0.3
    assert "1,800 in" in text
