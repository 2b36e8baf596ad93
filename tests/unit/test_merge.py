"""Merged exports: what PEFT and transformers would have written, without a model in memory, or nothing at all."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from configs import compose, runfolder
from configs.errors import UserError
from configs.schema import ModelConfig, SlurmConfig, StreamConfig
from prefix_train import engines, export, outcome
from prefix_train import model as models_of_runs
from prefix_train.exports import merge, shards
from prefix_train.exports.merge import Merging
from prefix_train.exports.run import export_run, newest_of
from prefix_train.stream import build, sources
from prefix_train.stream.places import Choice
from prefix_train.tensors import TensorError
from tests import exported, models, streams, tiny_text
from tests.unit.test_stream_build import bytes_of_tensors, gguf

SMALL = Merging(shard_bytes=20_000)
FAMILIES = [
    "llama",
    "qwen3",
    "olmo_hybrid",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5",
    "qwen3_5_moe_text",
    "qwen3_5_moe",
]


def loaded(folder: Path, like: PreTrainedModel) -> PreTrainedModel:
    """What transformers makes of a folder, without a complaint."""
    found, keys = type(like).from_pretrained(folder, dtype="auto", local_files_only=True, output_loading_info=True)
    assert not any(keys.values()), keys
    return found


def unequal(one: PreTrainedModel, other: PreTrainedModel) -> list[str]:
    """Names of tensors that are not in both, or not equal to the bit."""
    mine, theirs = one.state_dict(), other.state_dict()
    differ = [name for name in mine.keys() & theirs.keys() if not torch.equal(mine[name], theirs[name])]
    return sorted({*differ, *(mine.keys() ^ theirs.keys())})


def path_run(tmp_path: Path, family: str, dtype: str = "float32", trainable: str = "adapter") -> Path:
    source = exported.model_folder(tmp_path / "source", family)
    return exported.run_of(tmp_path / "run", ModelConfig(path=str(source), dtype=dtype), family, trainable)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_what_peft_and_transformers_write_to_the_bit(tmp_path: Path, family: str) -> None:
    """The same files with the same names and tensors, and the same index; mergers of a vision tower among them."""
    run = path_run(tmp_path, family)
    wanted = exported.merged_by_peft(run)
    done = export_run(run, merging=SMALL)
    assert done.folder == run / "merged"
    assert unequal(loaded(done.folder, wanted), wanted) == []
    wanted.save_pretrained(tmp_path / "theirs", max_shard_size=20_000)
    mine, theirs = files(done.folder), files(tmp_path / "theirs")
    assert len(theirs) > 4
    if hasattr(wanted.get_decoder().config, "num_experts"):
        # transformers keeps the pieces of a fused tensor in one file, so its files are others.
        mine, theirs = ({"all": {key: one[key] for one in found.values() for key in one}} for found in (mine, theirs))
        assert index(done.folder)["weight_map"].keys() == index(tmp_path / "theirs")["weight_map"].keys()
    else:
        assert index(done.folder) == index(tmp_path / "theirs")
    assert mine.keys() == theirs.keys()
    for name in theirs:
        assert mine[name].keys() == theirs[name].keys(), name
        assert all(torch.equal(mine[name][key], value) for key, value in theirs[name].items()), name
    assert json.loads((done.folder / "config.json").read_text())["dtype"] == "float32"


def files(folder: Path) -> dict[str, dict[str, Tensor]]:
    return {path.name: load_file(path) for path in folder.glob("*.safetensors")}


def index(folder: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads((folder / shards.INDEX).read_text())
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_bfloat16_is_rounded_once(tmp_path: Path, family: str) -> None:
    """A merged weight is the nearest bfloat16 of the float32 sum; PEFT's is the same."""
    run = path_run(tmp_path, family, "bfloat16")
    done = export_run(run, merging=SMALL)
    peft = exported.merged_by_peft(run).to(torch.bfloat16)  # the merger's masters too
    found = loaded(done.folder, peft)
    assert found.dtype == torch.bfloat16
    assert unequal(found, peft) == []
    layer = next(name for name in dict(found.named_parameters()) if name.endswith("q_proj.weight"))
    adapted = exported.restored(run)
    module = dict(adapted.named_modules())[f"base_model.model.{layer.removesuffix('.weight')}"]
    exact = module.get_base_layer().weight.double() + 3.0 * (
        module.lora_B["default"].weight.double() @ module.lora_A["default"].weight.double()
    )
    ulp = 2.0 ** (exact.abs().log2().floor() - 7)
    assert ((found.state_dict()[layer].double() - exact).abs() <= 0.5001 * ulp).all()


def test_other_dtypes_than_the_runs_are_rounded_once_as_well(tmp_path: Path) -> None:
    run = path_run(tmp_path, "llama")
    done = export_run(run, merging=dataclasses.replace(SMALL, dtype="bfloat16"))
    wanted = exported.merged_by_peft(run).to(torch.bfloat16)
    assert unequal(loaded(done.folder, wanted), wanted) == []


@pytest.mark.parametrize(
    ("dtype", "trainable", "merging"),
    [
        ("bfloat16", "adapter", SMALL),
        ("bfloat16", "all", SMALL),
        ("float32", "adapter", dataclasses.replace(SMALL, dtype="bfloat16")),
    ],
)
def test_what_transformers_keeps_in_float32_is_not_rounded(
    tmp_path: Path, dtype: str, trainable: str, merging: Merging
) -> None:
    run = path_run(tmp_path, "olmo_hybrid", dtype, trainable)
    wanted = exported.merged_by_peft(run)
    found = loaded(export_run(run, merging=merging).folder, wanted).state_dict()
    stored = {key: tensor for one in files(run / "merged").values() for key, tensor in one.items()}
    kept = {name for name, tensor in stored.items() if tensor.dtype != torch.bfloat16}
    assert kept == {f"model.layers.{layer}.linear_attn.A_log" for layer in range(3)}
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(found[name], tensor.to(torch.float32 if name in kept else torch.bfloat16)), name
    assert not any(torch.equal(stored[name].bfloat16().float(), stored[name]) for name in kept)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe"])
def test_where_everything_was_trained_the_checkpoint_is_streamed(tmp_path: Path, family: str) -> None:
    run = path_run(tmp_path, family, "bfloat16", "all")
    done = export_run(run, merging=SMALL)
    wanted = exported.restored(run).to(torch.bfloat16)
    assert unequal(loaded(done.folder, wanted), wanted) == []
    assert done.parameters == sum(parameter.numel() for parameter in wanted.parameters())


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    source = exported.model_folder(tmp_path / "source", "llama", tie_word_embeddings=True)
    run = exported.run_of(tmp_path / "run", ModelConfig(path=str(source), dtype="float32"))
    done = export_run(run, merging=SMALL)
    assert "lm_head.weight" not in index(done.folder)["weight_map"]
    again = loaded(done.folder, wanted := exported.merged_by_peft(run))
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert unequal(again, wanted) == []


def test_a_gguf_file_becomes_a_model_folder(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf")
    model = ModelConfig(path=str(path), dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models_of_runs.tiny, "load_processor", lambda folder: models_of_runs.tiny.build_tokenizer())
        run = exported.run_of(tmp_path / "run", model)
        done = export_run(run, merging=SMALL)
        wanted = exported.merged_by_peft(run)
    assert unequal(loaded(done.folder, wanted), wanted) == []
    assert AutoTokenizer.from_pretrained(done.folder).chat_template


def test_a_model_that_a_configuration_builds(tmp_path: Path) -> None:
    run = exported.run_of(tmp_path / "run", ModelConfig(build=tiny_text.BUILD, dtype="float32"))
    done = export_run(run, merging=Merging())
    assert [path.name for path in done.folder.glob("*.safetensors*")] == ["model.safetensors"]
    wanted = exported.merged_by_peft(run)
    assert unequal(loaded(done.folder, wanted), wanted) == []


# The streaming engine's runs.


def streamed_run(tmp_path: Path, choice: Choice) -> Path:
    source = exported.model_folder(tmp_path / "source", "qwen3")
    model = ModelConfig(path=str(source), dtype=str(choice.dtype).removeprefix("torch."))
    made = build.build(sources.open_source(model), tmp_path / "store", choice)
    stream = StreamConfig(store=str(made.folder), budget_gib=1.0)
    run = exported.run_of(tmp_path / "run", model, engine="stream", stream=stream, slurm=SlurmConfig(tasks_per_node=1))
    return run


def test_a_streamed_run_gives_the_same_adapter_and_the_original_weights(tmp_path: Path) -> None:
    run = streamed_run(tmp_path, streams.NF4)
    (run / "config.yaml").rename(tmp_path / "stream.yaml")
    resident = dataclasses.replace(compose.load(tmp_path / "stream.yaml"), engine="sharded", stream=StreamConfig())
    both = {}
    for name, config in (("resident", resident), ("stream", compose.load(tmp_path / "stream.yaml"))):
        runfolder.write_text(run / "config.yaml", compose.to_yaml(config))
        for merging in (None, SMALL):
            done = export_run(run, tmp_path / name / str(merging is None), merging)
            both.setdefault(merging, []).append(streams.contents(done.folder))
    for mine, theirs in both.values():
        assert mine == theirs


def test_the_stores_weights_are_taken_where_they_are_asked_for(tmp_path: Path) -> None:
    run = streamed_run(tmp_path, streams.NF4)
    done = export_run(run, merging=dataclasses.replace(SMALL, weights="store"))
    config = compose.from_run(run)
    adapted = models_of_runs.adapt(models_of_runs.skeleton(config.model), config)
    trained = export.from_checkpoint(newest_of(run)[1], adapted)
    wanted = outcome.restore(config, trained, torch.device("cpu"))[0].merge_and_unload()
    found = loaded(done.folder, wanted)
    assert unequal(found, wanted) == []
    original = loaded(export_run(run, tmp_path / "original", SMALL).folder, wanted)
    assert "model.layers.0.mlp.up_proj.weight" in unequal(found, original), "in 4 bits it is another one"
    assert json.loads((done.folder / export.RECORD).read_text())["weights"] == "store"
    assert engines.open_store(config).manifest.weights == "nf4"


def test_a_run_without_a_store_has_none_to_take(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--weights store: the run has none"):
        export_run(path_run(tmp_path, "qwen3"), merging=Merging("store"))
    assert not list((tmp_path / "run").glob("*merged*"))


# Memory.


def test_never_more_than_a_block_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging 110 MB of weights takes the memory of a few of its 32 blocks; and it would show if it took more."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 32, "vocab_size": 1024}
    source = exported.model_folder(tmp_path / "source", "qwen3", "1GB", **sizes, layer_types=["full_attention"] * 32)
    run = exported.run_of(tmp_path / "run", ModelConfig(path=str(source), dtype="bfloat16"))
    original = shards.Shards.write

    def growth(keep: bool) -> float:
        seen, kept, written = [], [], []

        def write(self: shards.Shards, name: str, tensor: Tensor) -> None:
            written.append(tensor.nbytes)
            kept.extend([tensor] * keep)
            if len(written) % 61 == 1:
                seen.append(bytes_of_tensors())
            original(self, name, tensor)

        monkeypatch.setattr(shards.Shards, "write", write)
        export_run(run, merging=dataclasses.replace(SMALL, shard_bytes=40_000_000))
        return (max(seen) - seen[0]) / sum(written)

    assert growth(False) < 0.25
    assert growth(True) > 0.75


# What would not be what was trained.


def test_a_damaged_write_is_found_on_reading_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = path_run(tmp_path, "qwen3_5_moe")
    original = shards.Shards.write

    def faulty(self: shards.Shards, name: str, tensor: Tensor) -> None:
        if name.endswith("layers.1.mlp.experts.2.up_proj.weight"):
            tensor = tensor.clone()
            tensor.view(-1)[5] += 1e-3
        original(self, name, tensor)

    monkeypatch.setattr(shards.Shards, "write", faulty)
    with pytest.raises(TensorError, match=r"layers\.1\.mlp\.experts\.gate_up_proj is not what was written"):
        export_run(run, merging=SMALL)
    assert not (run / "merged").exists()


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    run = path_run(tmp_path, "qwen3")
    change = merge.Lora("a", "b", 2.0)
    trained = {"a": torch.full((4, 32), 1e30), "b": torch.full((32, 4), 1e30)}
    with pytest.raises(TensorError, match=r"layers\.0\.q\.weight: a merged weight is not finite"):
        merge.merge("layers.0.q.weight", lambda: torch.zeros(32, 32), change, trained, torch.bfloat16)
    assert run.exists()


def test_every_trained_tensor_has_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = path_run(tmp_path, "qwen3")
    original = merge.changes_of

    def misnamed(*given: object) -> dict[str, merge.Change]:
        return {name.replace("layers.1", "layers.7"): change for name, change in original(*given).items()}

    monkeypatch.setattr(merge, "changes_of", misnamed)
    with pytest.raises(TensorError, match=r"layers\.7\..* was trained and is no tensor of the model"):
        export_run(run, merging=SMALL)
    assert not (run / "merged").exists()


def test_files_take_each_planned_tensor_once(tmp_path: Path) -> None:
    like = {"a": torch.empty(3, 2), "b": torch.empty(4, dtype=torch.bfloat16)}
    made = shards.Shards(tmp_path, like, 10**6)
    made.write("b", torch.arange(4).bfloat16())
    for name, tensor in (("b", like["b"]), ("c", like["b"]), ("a", like["b"]), ("a", torch.empty(2, 3))):
        with pytest.raises(TensorError, match="planned"):
            made.write(name, tensor)
    with pytest.raises(TensorError, match="1 tensor not written, a is one"):
        made.finish()
    made.write("a", torch.arange(6.0).view(3, 2))
    made.finish()
    found = load_file(tmp_path / "model.safetensors")
    assert found["a"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert found["b"].tolist() == [0, 1, 2, 3]


def test_a_source_folders_files_are_kept_to_the_byte(tmp_path: Path) -> None:
    source = exported.model_folder(tmp_path / "source", "qwen3_5")
    kept = {
        "video_preprocessor_config.json": b'{"what this environment": "cannot load"}',
        "generation_config.json": b'{"temperature": 0.25, "do_sample": true}',
        "chat_template.jinja": b"{# its own #}" + (source / "chat_template.jinja").read_bytes(),
    }
    for name, content in kept.items():
        (source / name).write_bytes(content)
    run = exported.run_of(tmp_path / "run", ModelConfig(path=str(source), dtype="float32"))
    done = export_run(run, merging=SMALL)
    for name in (*kept, "tokenizer.json", "processor_config.json"):
        assert (done.folder / name).read_bytes() == (source / name).read_bytes(), name
    (tmp_path / "usual").touch()
    assert {file.stat().st_mode for file in done.folder.iterdir()} == {(tmp_path / "usual").stat().st_mode}


def test_models_of_tests_cover_every_family() -> None:
    assert set(FAMILIES) <= set(models.FAMILIES)
