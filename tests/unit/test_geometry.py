"""A model's sizes read from its configuration, against transformers' own classes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from configs.errors import UserError
from configs.schema import AdapterConfig, ModelConfig
from prefix_train import adapters
from prefix_train.geometry import BUILT_VOCABULARY, Geometry, read_config
from prefix_train.sizes import DEEPSTACK, DEFAULTS, VISION, WITH_VISION
from prefix_train.tiny import build_tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
}
TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
ROUTED = {key: value for key, value in EXPERTS.items() if key != "shared_expert_intermediate_size"}
DEEP_TOWER: dict[str, Any] = {**TOWER, "deepstack_visual_indexes": [0, 1]}
NO_DENSE = {key: value for key, value in SMALL.items() if key != "intermediate_size"}

UNPADDED: dict[str, Any] = {**SMALL, "pad_token_id": None}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "llama with biases": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True},
    "llama, own head size": {"model_type": "llama", **SMALL, "head_dim": None, "num_key_value_heads": None},
    "qwen3": {"model_type": "qwen3", **SMALL},
    "qwen3, tied, biases": {"model_type": "qwen3", **SMALL, "attention_bias": True, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **SMALL, "sliding_window": None},
    "mixtral": {
        **{"model_type": "mixtral", **SMALL, "sliding_window": None},
        **{"num_local_experts": 6, "num_experts_per_tok": 2},
    },
    "smollm3": {"model_type": "smollm3", **UNPADDED},
    "smollm3, biases, not tied": {
        **{"model_type": "smollm3", **UNPADDED, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    },
    "olmo2": {"model_type": "olmo2", **UNPADDED, "attention_bias": True},
    "olmo3": {"model_type": "olmo3", **UNPADDED, "layer_types": ["full_attention"] * 4},
    "olmo_hybrid": {"model_type": "olmo_hybrid", **UNPADDED, **LINEAR},
    "olmo_hybrid, own head sizes": {"model_type": "olmo_hybrid", **UNPADDED},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "qwen3_moe": {"model_type": "qwen3_moe", **SMALL, **ROUTED},
    "qwen3_moe, some dense": {
        **{"model_type": "qwen3_moe", **SMALL, **ROUTED, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    },
    "qwen3_vl": {"model_type": "qwen3_vl", "text_config": SMALL, "vision_config": DEEP_TOWER},
    "qwen3_vl, tied": {
        **{"model_type": "qwen3_vl", "text_config": SMALL, "vision_config": DEEP_TOWER, "tie_word_embeddings": True},
    },
    "qwen3_vl_moe": {
        **{"model_type": "qwen3_vl_moe", "text_config": {**SMALL, **ROUTED, "mlp_only_layers": [1]}},
        **{"vision_config": DEEP_TOWER},
    },
    "qwen3_next": {"model_type": "qwen3_next", **SMALL, **LINEAR, **EXPERTS},
    "qwen3_next, some dense": {
        **{"model_type": "qwen3_next", **SMALL, **LINEAR, **EXPERTS},
        **{"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **SMALL, **LINEAR},
    "qwen3_5": {"model_type": "qwen3_5", "text_config": {**SMALL, **LINEAR}, "vision_config": TOWER},
    "qwen3_5, tied": {
        **{"model_type": "qwen3_5", "text_config": {**SMALL, **LINEAR, "tie_word_embeddings": True}},
        **{"vision_config": TOWER, "tie_word_embeddings": True},
    },
    "qwen3_5_moe": {
        **{"model_type": "qwen3_5_moe", "text_config": {**NO_DENSE, **LINEAR, **EXPERTS}},
        **{"vision_config": TOWER},
    },
    "qwen3_5, 27B": {
        "model_type": "qwen3_5",
        "text_config": {
            **{"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24},
            **{"linear_num_value_heads": 48},
        },
        "vision_config": {"out_hidden_size": 5120},
    },
    **{
        f"{name}, defaults": {"model_type": name}
        for name in (*DEFAULTS, *WITH_VISION)
        if name not in ("mistral", "olmo3") and not name.startswith("qwen3_vl") and name != "qwen3_5_moe_text"
    },
    **{f"{name}, defaults": {"model_type": name} for name in ("qwen3_vl", "qwen3_vl_moe")},
}


def model_of(config: dict[str, Any]) -> torch.nn.Module:
    """transformers' model without memory."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    own = AutoConfig.for_model(config["model_type"], **values)
    auto = AutoModelForImageTextToText if type(own) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(own)


def part_of(name: str) -> str:
    if "visual" in name:
        return "merger" if "merger" in name else "vision"
    return "embedding" if "embed_tokens" in name else "head" if "lm_head" in name else "layers"


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model(name: str) -> None:
    counted = dict.fromkeys(("embedding", "layers", "head", "vision", "merger"), 0)
    for tensor, parameter in model_of(MODELS[name]).named_parameters():
        counted[part_of(tensor)] += parameter.numel()
    assert Geometry.of(MODELS[name]).parameters == counted


@pytest.mark.parametrize("name", [name for name in MODELS if "defaults" not in name])
def test_linear_modules_are_those_of_the_model(name: str) -> None:
    geometry = Geometry.of(MODELS[name])
    found: list[dict[str, tuple[int, int]]] = [{} for _ in range(geometry.layers)]
    for path, module in model_of(MODELS[name]).named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in path:
            layer = int(path.split(".layers.")[1].split(".")[0])
            found[layer][path.rsplit(".", 1)[1]] = (module.in_features, module.out_features)
    assert [geometry.linears(layer) for layer in range(geometry.layers)] == found


@pytest.mark.parametrize("name", [name for name in MODELS if name == MODELS[name]["model_type"]])
def test_targets_are_the_modules_on_which_adapters_can_be(name: str) -> None:
    geometry, taken = Geometry.of(MODELS[name]), []
    for target in {module for layer in range(geometry.layers) for module in geometry.linears(layer)}:
        with contextlib.suppress(UserError):
            adapters.attach(model_of(MODELS[name]), AdapterConfig(rank=2, targets=[target]), 0)
            taken.append(target)
    assert list(geometry.targets) == sorted(taken)


def test_defaults_are_those_of_transformers() -> None:
    for model_type, sizes in DEFAULTS.items():
        fields = {
            name: field.default for name, field in type(AutoConfig.for_model(model_type)).__dataclass_fields__.items()
        }
        assert {name: fields[name] for name in sizes} == sizes, model_type
    for model_type, text in WITH_VISION.items():
        config = AutoConfig.for_model(model_type)
        assert config.text_config.model_type == text
        assert {name: getattr(config.vision_config, name) for name in VISION} == VISION
        assert getattr(config.vision_config, "deepstack_visual_indexes", None) == DEEPSTACK.get(model_type)


@pytest.mark.parametrize("options", [{}, {"full_attention_interval": 3}, {"num_hidden_layers": 6}])
def test_layer_types_are_those_of_transformers(options: dict[str, int]) -> None:
    for model_type in ("qwen3_next", "qwen3_5_text"):
        expected = tuple(AutoConfig.for_model(model_type, **options).layer_types)
        assert Geometry.of({"model_type": model_type, **options}).layer_types == expected
    if "full_attention_interval" not in options:
        expected = tuple(AutoConfig.for_model("olmo_hybrid", **options).layer_types)
        assert Geometry.of({"model_type": "olmo_hybrid", **options}).layer_types == expected
    assert set(Geometry.of({"model_type": "llama"}).layer_types) == {"full_attention"}


def test_a_saved_configuration_is_read(tmp_path: Path) -> None:
    values = {key: value for key, value in MODELS["qwen3_5"].items() if key != "model_type"}
    AutoConfig.for_model("qwen3_5", **values).save_pretrained(tmp_path)
    saved = Geometry.of(read_config(ModelConfig(path=str(tmp_path))))
    assert saved.parameters == Geometry.of(MODELS["qwen3_5"]).parameters


def test_a_built_model_has_its_tokenizer_s_vocabulary() -> None:
    assert len(build_tokenizer()) == BUILT_VOCABULARY
    for model_type in ("qwen3", "qwen3_5"):
        assert Geometry.of(read_config(ModelConfig(build={"model_type": model_type}))).vocabulary == BUILT_VOCABULARY
    named = {"model_type": "qwen3", "vocab_size": 5000}
    assert Geometry.of(read_config(ModelConfig(build=named))).vocabulary == 5000


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba': its sizes are not known; known are llama, "),
        ({}, "model_type 'None'"),
        (
            {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 32},
            r"layer_types\[0\] is 'sliding_attention'",
        ),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "names 1 layer, the model has 32"),
        ({"model_type": "mistral"}, "sliding_window is 4096: a sliding window is not exact over a tree"),
        ({"model_type": "olmo3"}, r"layer_types\[0\] is 'sliding_attention'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, r"layer_types\[28\] is 'sliding_attention'"),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, r"layer_types\[0\] is 'sliding_attention'"),
    ],
)
def test_what_is_not_known_is_named(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Geometry.of(config)


@pytest.mark.parametrize("content", [None, "{", "[]", json.dumps("text")])
def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"model\.path: .*config\.json"):
        read_config(ModelConfig(path=str(tmp_path)))


def test_sizes_that_are_no_numbers_are_named() -> None:
    with pytest.raises(UserError, match="hidden_size is 'x': a whole number"):
        Geometry.of({"model_type": "llama", "hidden_size": "x"})
    with pytest.raises(UserError, match=r"head_dim is 12\.5"):
        Geometry.of({"model_type": "llama", "head_dim": 12.5})


def test_a_path_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    for path in (tmp_path, tmp_path / "model.bin"):
        with pytest.raises(UserError, match=r"is no model: a folder with config\.json"):
            read_config(ModelConfig(path=str(path)))
