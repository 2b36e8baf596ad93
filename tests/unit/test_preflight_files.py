"""What a node says of files: data, the model, and packages, which another node may have in part."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
from importlib import metadata
from pathlib import Path

import pytest

from configs.schema import Config, DataConfig, ModelConfig
from preflight import files, imports
from preflight.setting import Setting


def test_data_and_model_by_size_and_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, model = tmp_path / "train.jsonl", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    train.write_text("a" * 10)
    (tmp_path / "config.yaml").write_text("name: x")
    config = Config(data=DataConfig(train=str(train)), model=ModelConfig(path=str(model)))
    before = files.check_files(Setting(config, tmp_path))
    assert before.state == "pass"
    train.write_text("b" * 10)
    assert files.check_files(Setting(config, tmp_path)).facts != before.facts
    train.unlink()
    gone = files.check_files(Setting(config, tmp_path))
    assert gone.state == "fail"
    assert str(train) in gone.found
    train.write_text("c")

    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    assert "Permission denied" in files.check_files(Setting(config, tmp_path)).found


def test_data_whose_end_was_not_copied(tmp_path: Path) -> None:
    """A file of the full size whose second half is zeros, as an interrupted copy leaves it."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.write_bytes(b"a" * 10**6)
    cut.write_bytes(b"a" * 500_000 + b"\0" * 500_000)
    size, _, digest = files.fingerprint(whole)["whole"].partition(":")
    other_size, _, other = files.fingerprint(cut)["cut"].partition(":")
    assert size == other_size == "1000000"
    assert digest != other


def test_data_in_folders_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved dataset keeps its files in folders of their own; of very many files names and sizes are compared."""
    for name, text in {"dataset_dict.json": "{}", "train/data.arrow": "abc", "train/extra/odd \udcff.txt": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    whole = files.fingerprint(tmp_path)
    assert list(whole) == ["dataset_dict.json", "train/data.arrow", "train/extra/odd \\xff.txt"]
    (tmp_path / "train" / "data.arrow").write_text("abd")
    assert {name for name, value in files.fingerprint(tmp_path).items() if whole[name] != value} == {"train/data.arrow"}
    monkeypatch.setattr(files, "MOST", 2)
    many = files.fingerprint(tmp_path)
    assert list(many) == ["3 files"]
    (tmp_path / "train" / "data.arrow").write_text("abcd")
    assert files.fingerprint(tmp_path) != many


def test_a_shared_library_that_was_cut_short(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p/lib.so.2").write_bytes(b"x" * 100)
    (tmp_path / "p-1.dist-info").mkdir()
    (tmp_path / "p-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: p\nVersion: 1\n")
    (tmp_path / "p-1.dist-info/RECORD").write_text("p/lib.so.2,sha256=AAAA,100\n")
    (package,) = metadata.distributions(path=[str(tmp_path)])
    assert imports.changed(package) == []
    (tmp_path / "p/lib.so.2").write_bytes(b"x" * 99)
    assert imports.changed(package) == ["p/lib.so.2"]


@pytest.mark.parametrize(
    ("row", "content", "changed"),
    [
        ("p/a.py,sha256={},5", b"x = 2", ["p/a.py"]),
        ("p/a.py,sha256={},5", b"x = 1", []),
        ("p/a.py,,", b"x = 2", []),
        ("p/a.py,md5={},5", b"x = 2", []),
        ("p/a.py", b"x = 2", []),
        ('"p/b,c.py",sha256={},5', b"x = 1", ["p/b,c.py"]),
        ("../../../bin/a.py,sha256={},5", b"x = 1", []),
        ("p/a.pyc,sha256={},5", b"x = 1", []),
    ],
)
def test_a_file_of_a_package_against_its_record(tmp_path: Path, row: str, content: bytes, changed: list[str]) -> None:
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"x = 1").digest()).rstrip(b"=").decode()
    (tmp_path / "p").mkdir()
    (tmp_path / "p/a.py").write_bytes(content)
    (tmp_path / "p-1.dist-info").mkdir()
    (tmp_path / "p-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: p\nVersion: 1\n")
    (tmp_path / "p-1.dist-info/RECORD").write_text(row.format(digest) + "\n")
    (package,) = metadata.distributions(path=[str(tmp_path)])
    assert imports.changed(package) == changed


def test_sources_of_an_editable_package_are_hashed(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/a.py").write_text("x = 1")
    before = imports.sources(tmp_path)
    assert imports.sources(tmp_path) == before
    (tmp_path / "deep/a.py").write_text("x = 2")
    assert imports.sources(tmp_path) != before


def test_frozen_code_is_hashed_whole_but_for_what_python_compiles(tmp_path: Path) -> None:
    (tmp_path / "configs/__pycache__").mkdir(parents=True)
    (tmp_path / "configs/digits.yaml").write_text("a: 1")
    before = imports.sources(tmp_path, "*")
    (tmp_path / "configs/__pycache__/a.pyc").write_text("x")
    assert imports.sources(tmp_path, "*") == before
    (tmp_path / "configs/digits.yaml").write_text("a: 2")
    assert imports.sources(tmp_path, "*") != before
