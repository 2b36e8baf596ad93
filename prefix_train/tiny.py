"""A tiny tokenizer, processor and model: everything that the demonstration and the tests would otherwise download.

The tokenizer is Qwen3.5's class over all 256 bytes, the merges of `demo/merges.txt` and Qwen's special tokens, in this
order. The model is any transformers configuration with seeded random weights. `load_processor` also serves real model
folders: transformers' AutoProcessor fails where torchvision is not installed.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2VLImageProcessorPil,
    Qwen3_5Tokenizer,
)
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from configs.errors import UserError
from configs.modelpath import from_pretrained_arguments, is_gguf
from prefix_train import gguf_config

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Qwen's, in Qwen's order; their ids are the last of the vocabulary."""

PATCH = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
"""Image geometry of the demonstration: a merged token covers 16 x 16 pixels."""

MARKS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
"""Names that configurations of vision-language models give to special tokens."""

OLD_KEYS = {"full_attention_interval", "partial_rotary_factor", "rope_scaling", "rope_theta", "torch_dtype"}
"""Keys of model configurations that transformers accepts although no class declares them."""


UNLOADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, StrictDataclassError)
"""What transformers raises for files of a folder that are not what it expects."""


class Qwen3VLProcessor(transformers.Qwen3VLProcessor):
    """transformers' processor for text and images; a video processor would need torchvision, so it names none.

    It keeps the name: transformers writes it into saved folders, where it must name a class that transformers knows.
    """

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def build_tokenizer() -> PreTrainedTokenizerBase:
    """The byte-level tokenizer of the demonstration, with its chat template; the same ids on every machine."""
    merges = [tuple(line.split(" ")) for line in _demo_text("merges.txt").splitlines()]
    words = [*sorted(ByteLevel.alphabet()), *("".join(pair) for pair in merges), *SPECIAL_TOKENS]
    tokenizer = Qwen3_5Tokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_demo_text("chat_template.jinja"),
    )
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS], special_tokens=True)
    return tokenizer


def build_processor(config: PreTrainedConfig | None = None) -> Any:
    """The demonstration's processor; with `config` that model's: its patch geometry, the tokenizer alone for text."""
    tokenizer = build_tokenizer()
    geometry = PATCH
    if config is not None:
        vision = getattr(config, "vision_config", None)
        if vision is None:
            return tokenizer
        geometry = {
            "patch_size": vision.patch_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "merge_size": vision.spatial_merge_size,
        }
    one_token = (geometry["patch_size"] * geometry["merge_size"]) ** 2
    image_processor = Qwen2VLImageProcessorPil(
        **geometry,
        size={"shortest_edge": one_token, "longest_edge": 1024 * one_token},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return Qwen3VLProcessor(image_processor, tokenizer, chat_template=tokenizer.chat_template)


def load_processor(folder: Path) -> Any:
    """Processor of a model folder or GGUF file: a Qwen3VLProcessor where there is a vision tower, else the tokenizer.

    Images go through transformers' PIL backend also where torchvision is installed, so that every machine computes the
    same pixels. Nothing is downloaded. Raises UserError where `folder` is no model folder, lacks a file or has a broken
    one, or where its processor is of a kind that is not supported.
    """
    if is_gguf(folder):
        gguf_config.read_config(folder)  # names a missing package, an unreadable file, an unknown architecture
        return _load_tokenizer(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: {_no_folder(folder)}")
    config = _loaded(AutoConfig, folder)
    if getattr(config, "vision_config", None) is None:
        return _load_tokenizer(folder)
    kind = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    if kind != Qwen3VLProcessor.__name__:
        raise UserError(
            f"{folder}: {config.model_type} models use {kind}; images work with {Qwen3VLProcessor.__name__}"
        )
    tokenizer = _load_tokenizer(folder)
    image_processor = _loaded(AutoImageProcessor, folder, backend="pil")
    return Qwen3VLProcessor(image_processor, tokenizer, chat_template=tokenizer.chat_template)


def build_model(
    build: Mapping[str, Any], seed: int, dtype: torch.dtype = torch.float32, drawn_in: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A model with random weights for `build`, a transformers configuration with `model_type`.

    Token ids that `build` leaves out are the tiny tokenizer's. The weights are drawn in float32 from `seed` alone and
    then rounded to `dtype`; the global random state stays as it was. Raises UserError for a key that the configuration
    does not know, and for ids that are not the tokenizer's. drawn_in: the dtype to draw in, where float32 is too large.
    """
    config = build_config(build)
    auto = AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        auto = AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = auto.from_config(config, dtype=drawn_in)
        _draw_time_steps(model)
    return model.to(dtype=dtype).eval()


def _draw_time_steps(model: PreTrainedModel) -> None:
    """Gated DeltaNet's own initialisation of `dt_bias`, Mamba 2's: steps log-uniform between 0.001 and 0.1.

    transformers sets `dt_bias` to one: nearly every head forgets within a token, and training from there takes long
    before anything reaches from an image to an answer (the demonstration: 9% instead of 96% after 110 updates).
    """
    for module in model.modules():
        if isinstance(bias := getattr(module, "dt_bias", None), torch.nn.Parameter):
            step = torch.empty_like(bias).uniform_(math.log(0.001), math.log(0.1)).exp()
            bias.data.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus


def build_config(build: Mapping[str, Any]) -> PreTrainedConfig:
    """`build` as a configuration of transformers, every key known and the tokenizer's ids filled in."""
    model_type = build.get("model_type")
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), CONFIG_MAPPING.keys(), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"model.build.model_type: transformers has no model type {model_type!r}{hint}")
    _refuse_unknown_keys(build, CONFIG_MAPPING[model_type], "model.build")
    values = _with_token_ids(copy.deepcopy(dict(build)), CONFIG_MAPPING[model_type])
    del values["model_type"]
    try:
        return AutoConfig.for_model(model_type, **values)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise UserError(f"model.build: {error}") from error


def _refuse_unknown_keys(values: Mapping[str, Any], kind: type, where: str) -> None:
    """Raise UserError for the first key of `values` that neither `kind` nor its parts declare."""
    parts: Mapping[str, type] = kind.sub_configs  # type: ignore[attr-defined]
    names = {field.name for field in dataclasses.fields(kind)}
    _refuse_strangers(values, {*names, *kind.attribute_map, *OLD_KEYS, "model_type"}, where)  # type: ignore[attr-defined]
    for name in [name for name in parts if name in values]:
        if not isinstance(values[name], Mapping):
            raise UserError(f"{where}.{name} is {values[name]!r}: give a configuration with its keys")
        _refuse_unknown_keys(values[name], parts[name], f"{where}.{name}")
    if isinstance(values.get("rope_parameters"), Mapping):
        known = {*RopeParameters.__annotations__, *kind.ignore_keys_at_rope_validation}  # type: ignore[attr-defined]
        _refuse_strangers(values["rope_parameters"], known, f"{where}.rope_parameters")


def _refuse_strangers(values: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            raise UserError(f"{where}.{key}: no such key" + (f"; did you mean {near[0]}?" if near else ""))


def _with_token_ids(values: dict[str, Any], kind: type) -> dict[str, Any]:
    """`values` with the tiny tokenizer's ids where it names none; UserError where it names others."""
    tokenizer = build_tokenizer()
    language = values.setdefault("text_config", {}) if "text_config" in kind.sub_configs else values  # type: ignore[attr-defined]
    size = language.setdefault("vocab_size", len(tokenizer))
    if isinstance(size, int) and size < len(tokenizer):
        raise UserError(f"model.build: vocab_size {size} is below the tokenizer's {len(tokenizer)} tokens")
    wanted = [(language, "eos_token_id", "<|im_end|>"), (language, "pad_token_id", "<|endoftext|>")]
    names = {field.name for field in dataclasses.fields(kind)}
    wanted += [(values, name, token) for name, token in MARKS.items() if name in names]
    for holder, name, token in wanted:
        mine = tokenizer.convert_tokens_to_ids(token)
        if holder.setdefault(name, mine) != mine:
            raise UserError(
                f"model.build: {name} is {holder[name]}, but the tokenizer's {token} is {mine}; leave it out"
            )
    return values


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = _loaded(AutoTokenizer, folder)
    if not tokenizer("text", add_special_tokens=False).input_ids:
        # transformers makes an empty one, without a word, where the vocabulary's file is missing
        raise UserError(f"{folder}: the tokenizer has no vocabulary; put its tokenizer.json there")
    return tokenizer


def _loaded(auto: Any, folder: Path, **options: Any) -> Any:
    where, more = from_pretrained_arguments(folder)
    try:
        # Code that a folder brings along is never run, nor asked for.
        return auto.from_pretrained(where, local_files_only=True, trust_remote_code=False, **more, **options)
    except UNLOADABLE as error:
        raise UserError(f"{folder}: {auto.__name__} finds nothing that it can load: {_said(error)}") from error


def _no_folder(path: Path) -> str:
    """Why `path` is no model folder, and what was perhaps meant."""
    if path.is_file():
        return "a model is a folder in transformers' format, or a GGUF file, whose name ends in .gguf"
    files = sorted(file.name for file in path.glob("*.gguf"))
    meant = f"it holds {files[0]}: name that file" if files else "model.path names one in transformers' format"
    return f"no config.json, so no model folder; {meant}"


def _said(error: Exception) -> str:
    """What is wrong; some errors only quote what they did not find."""
    return f"{type(error).__name__}: {error}" if isinstance(error, LookupError | AttributeError) else str(error)


def _demo_text(name: str) -> str:
    return resources.files("prefix_train").joinpath("demo", name).read_text(encoding="utf-8")
