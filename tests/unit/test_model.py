"""Loading, adapting and preparing models: what is trained, in which precision, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from configs.errors import UserError
from configs.schema import AdapterConfig, Config, MemoryConfig, ModelConfig, TrainConfig
from prefix_train import adapters, anatomy, dropout, model, precision, tiny
from prefix_train.dropout import SeededDropout
from tests import models, tiny_vision


def options(**given: object) -> Config:
    adapter = AdapterConfig(rank=2, dropout=float(given.get("dropout", 0.0)), merger=bool(given.get("merger", True)))
    return Config(train=TrainConfig(trainable=given.get("trainable", "adapter")), adapter=adapter)  # type: ignore[arg-type]


def test_adapting_a_model_warns_of_nothing() -> None:
    """PEFT asks transformers by an old name; `get_peft_model` alone does warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.adapt(models.build("qwen3"), options())
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        adapters.get_peft_model(models.build("qwen3"), adapters.LoraConfig(target_modules=["q_proj"]))


# Load.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny model with its processor."""
    path = tmp_path_factory.mktemp("model")
    built, processor = model.load(ModelConfig(build=tiny_vision.BUILD, seed=3, dtype="float32"))
    built.save_pretrained(path)
    processor.save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_is_the_same_built_or_loaded(folder: Path, dtype: str) -> None:
    built, _ = model.load(ModelConfig(build=tiny_vision.BUILD, seed=3, dtype=dtype))  # type: ignore[arg-type]
    loaded, processor = model.load(ModelConfig(path=str(folder), dtype=dtype))  # type: ignore[arg-type]
    assert type(loaded) is type(built)
    assert not loaded.training
    assert processor.image_processor.merge_size == 2
    theirs = dict(built.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == model.DTYPES[dtype]
        assert torch.equal(parameter, theirs[name]), name


def damaged(folder: Path, tmp_path: Path, change: str) -> Path:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))
    tensor = tensors.pop(name)
    if change == "unexpected":
        tensors |= {name: tensor, name.replace("up_proj", "sideways_proj"): tensor.clone()}
    elif change == "mismatched":
        tensors[name] = tensor[:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


@pytest.mark.parametrize("change", ["missing", "unexpected", "mismatched"])
def test_a_checkpoint_that_does_not_fit_is_refused(folder: Path, tmp_path: Path, change: str) -> None:
    """R11's kind: a tensor that finds no place is an error, not a random weight."""
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.(up|sideways)_proj\.weight"):
        model.load(ModelConfig(path=str(damaged(folder, tmp_path, change)), dtype="float32"))


def shards(folder: Path, weight_map: object) -> None:
    """Keep the weights in a file that an index with `weight_map` is to name."""
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "cut off": (lambda folder: os.truncate(folder / "model.safetensors", 5000), r"model.safetensors cannot be read as"),
    "a page": (lambda folder: (folder / "model.safetensors").write_text("<html>"), "model.safetensors cannot be read"),
    "of Git LFS": (
        lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "model.safetensors cannot be read as safetensors: it is a pointer of Git LFS",
    ),
    "a missing shard": (lambda folder: shards(folder, {"x": "a.safetensors", "y": "b.safetensors"}), "b.safetensors"),
    "an index without files": (lambda folder: shards(folder, None), "index.json"),
}


@pytest.mark.parametrize("what", WEIGHTS)
def test_weights_that_cannot_be_read_are_one_line_with_the_file(what: str, folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    change, complaint = WEIGHTS[what]
    change(copy)
    with pytest.raises(UserError, match=rf"{copy}/.*{complaint}") as caught:
        model.load(ModelConfig(path=str(copy), dtype="float32"))
    assert "\n" not in str(caught.value)


def test_audit_names_the_first_three() -> None:
    keys = {"missing_keys": {f"k{index}" for index in range(5)}, "unexpected_keys": set()}
    with pytest.raises(UserError, match=r"missing keys: k0, k1, k2 and 2 more"):
        model.audit(Path("m"), keys)
    model.audit(Path("m"), {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []})


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        model.load(ModelConfig(path=str(tmp_path)))


# Adapt.


def test_adapters_are_on_the_language_model_alone() -> None:
    adapted = adapters.attach(models.build("qwen3_5"), AdapterConfig(rank=2), 0)
    names = list(anatomy.trainable(adapted))
    lora = [name for name in names if "lora_" in name]
    assert all(".language_model.layers." in name for name in lora)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in lora} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj")
    }
    mergers = [name for name in names if "lora_" not in name]
    assert len(mergers) == 6
    assert all(".visual.merger.modules_to_save.default." in name for name in mergers)


def test_a_name_that_the_vision_tower_has_too_is_adapted_in_the_language_model_only() -> None:
    base = models.build("qwen3_5")
    base.model.visual.blocks[0].attn.q_proj = nn.Linear(4, 4)
    adapted = adapters.attach(base, AdapterConfig(rank=2, targets=["q_proj"]), 0)
    assert type(adapted.get_base_model().model.visual.blocks[0].attn.q_proj) is nn.Linear


def test_all_mergers_are_trained_deepstack_too() -> None:
    vision = {**models._VISION, "deepstack_visual_indexes": [0, 1]}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    text = {**models._SHARED, "num_hidden_layers": 3, "rope_parameters": rope}
    with torch.random.fork_rng():
        base = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **models._MARKS))
    adapted = adapters.attach(base, AdapterConfig(rank=2), 0)
    trained = {name for name in anatomy.trainable(adapted) if "lora_" not in name}
    everything = {name for name, _ in adapted.named_parameters() if "merger" in name and "original_module" not in name}
    assert len(trained) == 18
    assert trained == everything
    without = adapters.attach(
        Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **models._MARKS)),
        AdapterConfig(rank=2, merger=False),
        0,
    )
    assert all("lora_" in name for name in anatomy.trainable(without))


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("qproj", "did you mean q_proj"),
        ("self_attn.q_porj", "did you mean q_proj"),
        ("xyz", "It has .*down_proj"),
        ("lm_head", "no linear module of the language model"),
        ("proj", "no linear module of the language model"),
    ],
)
def test_a_target_that_matches_nothing_names_the_nearest(target: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        adapters.attach(models.build("qwen3_5"), AdapterConfig(targets=["v_proj", target]), 0)


def test_a_dotted_target_narrows() -> None:
    adapted = adapters.attach(
        models.build("llama"), AdapterConfig(rank=2, targets=["self_attn.q_proj", "mlp.up_proj"]), 0
    )
    assert len(anatomy.trainable(adapted)) == 2 * 2 * 2


@pytest.mark.parametrize("targets", [["gate_proj"], ["gate_proj", "up_proj"], ["down_proj", "q_proj"]])
def test_names_that_peft_takes_for_experts_are_refused(targets: list[str]) -> None:
    """PEFT turns them into other targets, on fused parameters, without a word."""
    with pytest.raises(UserError, match=r"adapter\.targets: PEFT .* leave these names out"):
        adapters.attach(models.build("qwen3_next"), AdapterConfig(rank=2, targets=targets), 0)


@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_default_targets_mean_the_same_modules_in_every_family_or_are_refused(family: str) -> None:
    """Linear modules of those names, the shared expert's among them, and never a part of the other experts."""
    base = models.build(family)
    if family in models.WITHOUT_GATE:
        with pytest.raises(UserError, match=r"leave these names out|'gate_proj' is no linear module"):
            adapters.attach(base, AdapterConfig(rank=2), 0)
        return
    names = AdapterConfig().targets
    linear = {name for name, module in base.get_decoder().named_modules() if isinstance(module, nn.Linear)}
    wanted = {name for name in linear if name.rpartition(".")[2] in names}
    trained = {name for name in anatomy.trainable(adapters.attach(base, AdapterConfig(rank=2), 0)) if "lora_" in name}
    assert {name.split(".lora_")[0].partition("layers.")[2] for name in trained} == {
        name.partition("layers.")[2] for name in wanted
    }
    assert any("gate_proj" in name for name in trained)
    assert not any(".experts." in name for name in trained)


def test_the_shared_expert_is_adapted_where_peft_allows_it() -> None:
    adapted = adapters.attach(models.build("qwen3_5_moe_text"), AdapterConfig(rank=2, targets=["gate_proj"]), 0)
    assert all(".mlp.shared_expert.gate_proj." in name for name in anatomy.trainable(adapted))


def test_initial_adapters_follow_from_the_seed_alone() -> None:
    found = []
    for noise, seed in ((1, 0), (2, 0), (2, 7)):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        adapted = adapters.attach(models.build("llama"), AdapterConfig(rank=2), seed)
        assert torch.equal(torch.get_rng_state(), before)
        found.append(torch.cat([parameter.detach().flatten() for parameter in anatomy.trainable(adapted).values()]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("trainable", ["adapter", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_masters_are_at_least_float32_and_the_rest_is_untouched(trainable: str, dtype: torch.dtype) -> None:
    prepared = model.prepare(models.build("qwen3_5", dtype), options(trainable=trainable))
    assert prepared.training
    for name, parameter in prepared.named_parameters():
        wanted = torch.promote_types(dtype, torch.float32) if parameter.requires_grad else dtype
        assert parameter.dtype == wanted, name
    trained = anatomy.trainable(prepared)
    assert len(trained) == (22 if trainable == "adapter" else len(list(prepared.parameters())))


def test_ties_survive_masters() -> None:
    base = models.build("llama", torch.bfloat16)
    base.lm_head.weight = base.model.embed_tokens.weight
    base.requires_grad_(True)
    precision.make_masters(base)
    assert base.lm_head.weight is base.model.embed_tokens.weight
    with precision.Copies(base, torch.bfloat16):
        assert base.lm_head.weight is base.model.embed_tokens.weight
        assert base.lm_head.weight.dtype == torch.bfloat16
    assert base.lm_head.weight is base.model.embed_tokens.weight
    assert isinstance(base.lm_head.weight, nn.Parameter)


def test_copies_are_undone_after_an_error() -> None:
    base = models.build("llama", torch.float32)
    before = dict(base.named_parameters())

    def fail() -> None:
        with precision.Copies(base, torch.bfloat16):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    after = dict(base.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


# Dropout.


def test_every_adapter_has_a_seeded_dropout_with_its_own_place() -> None:
    prepared = model.prepare(models.build("qwen3_5"), options(dropout=0.1))
    found = dropout.find(prepared)
    assert len(found) == 4 + 4
    assert len({one.place for one in found}) == len(found)
    assert not any(isinstance(module, nn.Dropout) for module in prepared.modules())


def test_a_mask_follows_from_draw_and_place_alone() -> None:
    ones = torch.ones(50, 40)

    def mask(draw: str, place: str) -> torch.Tensor:
        module = SeededDropout(0.25, place).train()
        module.draw = draw
        masked: torch.Tensor = module(ones)
        return masked

    torch.manual_seed(0)
    first = mask("1/2/3", "layer.q")
    torch.manual_seed(9)
    state = torch.get_rng_state()
    assert torch.equal(mask("1/2/3", "layer.q"), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(mask("1/2/4", "layer.q"), first)
    assert not torch.equal(mask("1/2/3", "layer.k"), first)
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert first.mean().item() == pytest.approx(1.0, abs=0.05)
    assert not torch.equal(mask("1", "2/3layer.q"), mask("1/2", "3layer.q"))


def test_dropout_without_a_draw_is_an_error_and_off_in_evaluation() -> None:
    module = SeededDropout(0.5, "layer.q")
    inputs = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"layer\.q: dropout without a draw"):
        module(inputs)
    assert module.eval()(inputs) is inputs


def test_the_models_own_dropout_is_refused() -> None:
    base = models.build("llama")
    base.model.layers[1].mlp.drop = nn.Dropout(0.1)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.drop: dropout 0\.1 .* unseeded"):
        model.prepare(base, options())


# Anatomy.


@pytest.mark.parametrize("family", sorted(models.FAMILIES))
def test_every_family_is_taken_apart(family: str) -> None:
    base = models.build(family)
    for each in (base, adapters.attach(models.build(family), AdapterConfig(rank=2, targets=["q_proj"]), 0)):
        found = anatomy.find(each)
        assert len(found.layers) == found.decoder.config.num_hidden_layers
        assert found.head.out_features == models.VOCABULARY
        assert (found.vision is not None) == (family in models.WITH_VISION)
        assert len(found.blocks) == (2 if found.vision is not None else 0)
        deep = len(getattr(found.vision.config, "deepstack_visual_indexes", ())) if found.vision is not None else 0
        assert len(found.mergers) == (1 + deep if found.vision is not None else 0)


def test_what_has_no_head_is_refused() -> None:
    with pytest.raises(ValueError, match="no linear language head"):
        anatomy.find(models.build("llama").model)


def test_a_build_is_not_recomputed_where_it_is_switched_off() -> None:
    config = Config(train=TrainConfig(trainable="all"), memory=MemoryConfig(recompute=False))
    prepared = model.prepare(tiny.build_model(tiny_vision.BUILD, 0), config)
    assert not any(layer.forward.recompute for layer in anatomy.find(prepared).layers)
