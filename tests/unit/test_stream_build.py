"""Building a store: what transformers would have loaded, tensor by tensor, and nothing that is half right."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import gc
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from configs import compose
from configs.errors import UserError
from configs.schema import ModelConfig
from prefix_train import model as models_of_runs
from prefix_train.bench_pack import geometry_file
from prefix_train.geometry import Geometry, read_config
from prefix_train.stream import build, engine, origin, places, random_store, sources
from prefix_train.stream.manifest import NAME
from prefix_train.stream.store import Store
from tests import models, streams


def saved(folder: Path, family: str = "qwen3", shards: str = "20KB", **config: Any) -> Path:
    """A tiny model on disk in float32, in many shards."""
    models.build(family, **config).save_pretrained(folder, max_shard_size=shards)
    return folder


def converted(source: Path, out: Path, choice: places.Choice = streams.BF16) -> Store:
    """The store that a run with `model.path` of this folder could use."""
    dtype = str(choice.dtype).removeprefix("torch.")
    return build.build(sources.open_source(ModelConfig(path=str(source), dtype=dtype)), out, choice)


def loaded(source: Path) -> PreTrainedModel:
    """What a run would load from the folder, without its processor."""
    kind = type(models_of_runs.skeleton(ModelConfig(path=str(source))))
    found: PreTrainedModel = kind.from_pretrained(source, dtype=torch.bfloat16, local_files_only=True)
    return found


def differ(store: Store, state: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not in both, or not equal. A tied head is in a state under a name of its own, too."""
    found = dict(pair for block in store.blocks for pair in store.tensors(block))
    unequal = [name for name in found.keys() & state.keys() if not torch.equal(found[name], state[name])]
    alias = {"lm_head.weight"} if store.manifest.tied else set()
    return sorted({*unequal, *(found.keys() ^ (state.keys() - alias))})


def test_what_transformers_keeps_in_float32_stays_so(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", "olmo_hybrid")
    skeleton = models_of_runs.skeleton(ModelConfig(path=str(source)), buffers=True)
    engine.fill(skeleton, converted(source, tmp_path / "store"), whole=True)
    wanted = dict(loaded(source).named_parameters())
    kept = [name for name, parameter in skeleton.named_parameters() if parameter.dtype == torch.float32]
    assert kept == [f"model.layers.{layer}.linear_attn.A_log" for layer in range(3)]
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in skeleton.named_parameters())


@pytest.mark.parametrize("family", models.FAMILIES)
def test_shards_become_what_transformers_loads(tmp_path: Path, family: str) -> None:
    """With its renamings and conversions: a checkpoint has experts one by one, the model has them fused."""
    source = saved(tmp_path / "model", family)
    assert len(list(source.glob("*.safetensors"))) > 3
    assert differ(converted(source, tmp_path / "store"), dict(loaded(source).state_dict())) == []


def test_a_single_file_is_read_as_well(tmp_path: Path) -> None:
    source = saved(tmp_path / "model", shards="1GB")
    assert [path.name for path in source.glob("*.safetensors")] == ["model.safetensors"]
    assert differ(converted(source, tmp_path / "store"), dict(loaded(source).state_dict())) == []


def retold(source: Path, change) -> Path:
    """The model folder with its tensors changed: all in one file."""
    path = source / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return source


def tied_model(folder: Path, change=lambda tensors: None) -> Path:
    return retold(saved(folder, "llama", "1GB", tie_word_embeddings=True), change)


def both(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def only_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


@pytest.mark.parametrize("change", [lambda tensors: None, both, only_head])
def test_a_tied_head_is_stored_once_under_whichever_name_it_came(tmp_path: Path, change) -> None:
    source = tied_model(tmp_path / "model", change)
    store = converted(source, tmp_path / "store")
    assert store.manifest.tied
    assert "head" not in [block.name for block in store.blocks]
    assert store.by_name["head"] is store.by_name["embedding"]
    assert differ(store, dict(loaded(source).state_dict())) == []


def test_a_head_that_is_said_to_be_tied_and_is_not_is_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        both(tensors)
        tensors["lm_head.weight"][3, 3] += 1

    with pytest.raises(UserError, match=r"lm_head\.weight differ"):
        converted(tied_model(tmp_path / "model", change), tmp_path / "store")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "missing keys: model.layers.1.mlp.up_proj"),
        (lambda tensors: tensors.update(strange=torch.zeros(3)), "unexpected keys: strange"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(97, 31)}), r"shape \[97, 32\] expected"),
    ],
)
def test_a_model_that_does_not_fit_its_configuration_is_refused(tmp_path: Path, change, words: str) -> None:
    with pytest.raises(UserError, match=words):
        converted(retold(saved(tmp_path / "model", shards="1GB"), change), tmp_path / "store")


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][2, 2] = float("nan")

    source = retold(saved(tmp_path / "model", shards="1GB"), change)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight .*not finite"):
        converted(source, tmp_path / "store", streams.NF4)


def test_what_is_quantised_already_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"quantised already \(fp8\)"):
        converted(source, tmp_path / "store")


def test_damaged_and_missing_shards_are_named(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    shard = min(source.glob("*.safetensors"))
    streams.cut(shard, shard.stat().st_size - 10)
    with pytest.raises(UserError, match=f"{shard.name} cannot be read"):
        converted(source, tmp_path / "store")
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name} does not exist"):
        converted(source, tmp_path / "store")
    (source / "model.safetensors.index.json").write_text("{")
    with pytest.raises(UserError, match=r"index\.json cannot be read"):
        converted(source, tmp_path / "store")


def gguf(path: Path, layers: int = 2) -> Path:
    """A tiny llama in one GGUF file, some of its matrices in 8 bits. Its tokenizer is a list of words."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    draw = torch.Generator().manual_seed(0)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(40)
    writer.add_token_list([f"word{index}" for index in range(40)])

    def add(name: str, *shape: int, small: bool = False) -> None:
        value, kind = torch.randn(shape, generator=draw).numpy(), GGMLQuantizationType.Q8_0 if small else None
        writer.add_tensor(name, value if kind is None else quantize(value, kind), raw_dtype=kind)

    add("token_embd.weight", 40, 32, small=True)
    add("output_norm.weight", 32)
    for layer in range(layers):
        sizes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
        sizes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
        for name, shape in sizes.items():
            add(f"blk.{layer}.{name}.weight", *shape, small=True)
        add(f"blk.{layer}.attn_norm.weight", 32)
        add(f"blk.{layer}.ffn_norm.weight", 32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_becomes_what_transformers_loads(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf")
    store = converted(path, tmp_path / "store")
    kind = type(models_of_runs.skeleton(ModelConfig(path=str(path))))
    loaded_one = kind.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.bfloat16)
    assert store.manifest.tied
    assert differ(store, dict(loaded_one.state_dict())) == []
    assert store.manifest.source["kind"] == "gguf"


def test_a_store_knows_which_model_it_was_made_of(tmp_path: Path) -> None:
    one, two = (str(saved(tmp_path / name)) for name in ("one", "two"))
    streams.change(min(Path(two).glob("*.safetensors")), 9000)
    store = converted(Path(one), tmp_path / "store")
    moved = shutil.copytree(one, tmp_path / "moved")
    sources.require_same(store, ModelConfig(path=str(moved)))
    with pytest.raises(UserError, match="whose weights are not those of"):
        sources.require_same(store, ModelConfig(path=two))
    config = tiny_geometry()
    with pytest.raises(UserError, match=r"are not those of model\.build"):
        sources.require_same(store, config)
    random = build.build(random_store.generate(config, streams.NF4, 0), tmp_path / "random", streams.NF4)
    sources.require_same(random, config)
    built = build.build(sources.open_source(config), tmp_path / "built", streams.BF16)
    sources.require_same(built, config)
    for other in (dataclasses.replace(config, seed=5), dataclasses.replace(config, build=config.build | {"a": 1})):
        with pytest.raises(UserError, match=r"are not those of model\.build"):
            sources.require_same(built, other)


def test_a_model_that_a_configuration_builds_is_stored_too(tmp_path: Path) -> None:
    config = compose.load(Path("configs/digits.yaml")).model
    choice = dataclasses.replace(streams.BF16, dtype=models_of_runs.DTYPES[config.dtype])
    store = build.build(sources.open_source(config), tmp_path / "store", choice)
    model, _ = models_of_runs.load(config)
    assert differ(store, dict(model.state_dict())) == []


def test_two_builds_are_the_same_to_the_byte(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    for name in ("one", "two"):
        converted(source, tmp_path / name, streams.NF4_TWICE)
    assert streams.contents(tmp_path / "one") == streams.contents(tmp_path / "two")


def test_building_again_what_is_there_changes_nothing(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    converted(source, tmp_path / "store")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()}
    converted(source, tmp_path / "store")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()} == before


def test_a_folder_with_another_store_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    converted(source, tmp_path / "store")
    for other, choice in ((source, streams.NF4), (saved(tmp_path / "other", "llama"), streams.BF16)):
        with pytest.raises(UserError, match="store of another model or in another form"):
            converted(other, tmp_path / "store", choice)


def test_a_folder_with_anything_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(UserError, match=r"holds letters\.txt and is no store"):
        streams.store(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]


class Stopped(Exception):
    """A build that ended in the middle."""


def stopped_after(source: sources.Source, block: str) -> sources.Source:
    """A source that fails when it is asked for anything of `block`."""

    def parts(asked, stored):
        if asked.name == block:
            raise Stopped
        return source.parts(asked, stored)

    return dataclasses.replace(source, parts=parts)


def begun(source: Path, out: Path) -> None:
    opened = sources.open_source(ModelConfig(path=str(source)))
    with pytest.raises(Stopped):
        build.build(stopped_after(opened, "block.1"), out, streams.BF16)
    assert (out / "block.0.bin").exists()
    assert not (out / NAME).exists()


def test_a_build_goes_on_and_keeps_what_was_whole(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    converted(source, tmp_path / "whole")
    begun(source, tmp_path / "store")
    streams.change(tmp_path / "store" / "embedding.bin", 500)
    opened, there = sources.open_source(ModelConfig(path=str(source))), []
    build.build(opened, tmp_path / "store", streams.BF16, lambda block, before: there.extend([block.name] * before))
    assert there == ["block.0"], "the embedding's file had been changed since"
    assert streams.contents(tmp_path / "store") == streams.contents(tmp_path / "whole")


def test_an_unfinished_store_of_something_else_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "model")
    begun(source, tmp_path / "store")
    with pytest.raises(UserError, match="holds an unfinished store of another"):
        converted(source, tmp_path / "store", streams.NF4)
    shard = min(source.glob("*.safetensors"))
    shutil.copy(shard, tmp_path / "kept")
    shutil.copy(tmp_path / "kept", shard)
    with pytest.raises(UserError, match="the model's files have changed"):
        converted(source, tmp_path / "store")


def test_two_builds_at_once_are_one_too_many(tmp_path: Path) -> None:
    source = sources.open_source(ModelConfig(path=str(saved(tmp_path / "model"))))

    def parts(block, stored):
        with pytest.raises(UserError, match="another process is building"):
            build.build(source, tmp_path / "store", streams.BF16)
        return source.parts(block, stored)

    build.build(dataclasses.replace(source, parts=parts), tmp_path / "store", streams.BF16)


def test_a_disk_that_is_too_small_is_known_before_anything_is_written(tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=20_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"the store needs [\d,]+ bytes more, and 20,000 are free"):
        streams.store(tmp_path / "store")
    assert not list((tmp_path / "store").glob("*.bin"))


def test_a_fingerprint_tells_models_of_one_shape_apart(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    prints = [origin.fingerprint(sorted(folder.glob("*.safetensors"))) for folder in (one, two)]
    assert prints[0] == prints[1]
    streams.change(min(two.glob("*.safetensors")), 9000)
    assert origin.fingerprint(sorted(two.glob("*.safetensors"))) != prints[0]


def test_no_more_than_a_few_tensors_are_in_memory(tmp_path: Path) -> None:
    """Building 110 MB of weights takes the memory of a few tensors of 2 MB; and it would show if it took more."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 32, "vocab_size": 1024}
    source = saved(tmp_path / "model", "qwen3", "1GB", **sizes, layer_types=["full_attention"] * 32)
    opened = sources.open_source(ModelConfig(path=str(source)))

    def growth(keep: bool, out: Path) -> float:
        seen, kept, turn = [], [], itertools.count()

        def parts(block, stored):
            found = opened.parts(block, stored)
            kept.extend([value.clone() for value in found.values()] * keep)
            if next(turn) % 61 == 0:
                seen.append(bytes_of_tensors())
            return found

        store = build.build(dataclasses.replace(opened, parts=parts), out, streams.BF16)
        return (max(seen) - seen[0]) / sum(block.nbytes for block in store.blocks)

    assert growth(False, tmp_path / "store") < 0.25
    assert growth(True, tmp_path / "held") > 0.75


def bytes_of_tensors() -> int:
    """Memory of all tensors that this process holds: fake ones, which other tests leave behind, have none."""
    held = (found for found in gc.get_objects() if type(found) in (Tensor, torch.nn.Parameter))
    storages = (found.untyped_storage() for found in held if found.device.type == "cpu")
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def tiny_geometry() -> ModelConfig:
    return compose.load(Path("tests/data/tiny-geometry.yaml")).model


@pytest.mark.parametrize("choice", [streams.BF16, streams.NF4, streams.NF4_TWICE])
def test_random_stores_follow_from_their_seed_and_compute(tmp_path: Path, choice: places.Choice) -> None:
    stores = [
        build.build(random_store.generate(tiny_geometry(), choice, seed), tmp_path / name, choice)
        for name, seed in (("one", 0), ("two", 0), ("three", 1))
    ]
    hashes = [streams.contents(store.folder) for store in stores]
    assert hashes[0] == hashes[1]
    assert all(hashes[0][file] != hashes[2][file] for file in ("block.0.bin", "head.bin", "manifest.json"))
    blocks = [block.sha256 for block in stores[0].layers]
    assert len(set(blocks)) == len(blocks), "each block is its own"
    assert "random" in stores[0].manifest.notes[0]

    model = models_of_runs.skeleton(tiny_geometry())
    state = dict(pair for block in stores[0].blocks for pair in stores[0].tensors(block))
    model.load_state_dict(state, assign=True)
    for name, value in state.items():
        assert torch.isfinite(value.float()).all(), name
        if value.dim() == 2 and min(value.shape) > 16:
            assert 0.01 < float(value.float().std()) < 0.04, name
    build_it = models_of_runs.load(tiny_geometry())[0].state_dict()
    norms = [name for name in state if "norm" in name]
    assert norms
    for name in norms:
        assert torch.equal(state[name], build_it[name]), name


def test_the_32b_geometry_is_that_of_the_public_record() -> None:
    geometry = Geometry.of(read_config(compose.load(geometry_file("qwen3-32b")).model))
    assert geometry.layers == 64
    assert round(geometry.layer_parameters(0) / 1e6, 1) == 487.6
    assert round(geometry.parameters["head"] / 1e6, 1) == 778.6


def test_the_32b_store_would_take_the_bytes_that_are_said() -> None:
    skeleton = models_of_runs.skeleton(compose.load(geometry_file("qwen3-32b")).model)
    sizes = {}
    for choice in (streams.NF4, streams.NF4_TWICE, streams.BF16):
        blocks = places.place(skeleton, choice)
        sizes[choice] = sum(block.nbytes for block in blocks if block.name.startswith("block."))
    assert round(sizes[streams.NF4] / 1e9, 2) == 17.55
    assert round(sizes[streams.NF4_TWICE] / 1e9, 2) == 16.1
    assert round(sizes[streams.BF16] / 1e9, 1) == 62.4


@pytest.mark.parametrize("where", ["a file", "below a file", "in /proc", "a link to nothing"])
def test_a_place_where_no_store_can_be_is_one_line(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    folder = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "store",
        "in /proc": Path("/proc/store"),
        "a link to nothing": tmp_path / "link",
    }[where]
    with pytest.raises(UserError, match=r"no store can be made in .*: give another --out$") as found:
        converted(saved(tmp_path / "model"), folder)
    assert "\n" not in str(found.value)


def test_what_a_build_did_not_write_itself_stays(tmp_path: Path) -> None:
    """Only what a killed build was writing is removed."""
    folder = tmp_path / "store"
    folder.mkdir()
    for name in (".mine", ".block.0.bin.host.1.tmp"):
        (folder / name).write_text("x")
    converted(saved(tmp_path / "model"), folder)
    assert sorted(path.name for path in folder.glob(".*")) == [".mine"]


def test_a_lock_that_cannot_be_had_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=r"building\.lock cannot be locked: No locks available: give another --out"):
        converted(saved(tmp_path / "model"), tmp_path / "store")


def test_a_folder_that_takes_no_files_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    (folder / build.LOCK).mkdir(parents=True)
    with pytest.raises(UserError, match=r"no store can be made in .*: Is a directory: give another --out"):
        converted(saved(tmp_path / "model"), folder)
