"""A model ready to be trained on packs (loaded or built, adapted, patched), and the root that makes a batch a loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from configs.errors import UserError
from configs.modelpath import from_pretrained_arguments, is_gguf, locate
from configs.schema import Config, ModelConfig
from prefix_train import adapters, anatomy, gguf_config, machine, patch, precision, tiles, tiny, unit, weight_files
from prefix_train.embedding import embed
from prefix_train.loss import target_losses

if TYPE_CHECKING:
    from prefix_train.collate import Batch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load(config: ModelConfig) -> tuple[PreTrainedModel, Any]:
    """The model of `config` in its dtype, in eval mode, and its processor (a tokenizer for a text model).

    Raises UserError where a checkpoint lacks a tensor, has one too many, or one of another shape: a model that was
    half loaded trains without complaint.
    """
    dtype = DTYPES[config.dtype]
    if config.path is None:
        model = tiny.build_model(config.build, config.seed, dtype)
        return model, tiny.build_processor(model.config)
    path = locate(config.path)
    processor = tiny.load_processor(path)
    return load_weights(path, dtype), processor


def load_weights(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model in `path`, a folder or a GGUF file, in eval mode. UserError as `load`."""
    if not is_gguf(path):
        weight_files.check(path)
    own = _config_of(path)
    folder, more = from_pretrained_arguments(path)
    plain = {"quantization_config": GgufConfig(dequantize=True)} if is_gguf(path) else {}
    # What does not fit is reported as such, then `audit` refuses it.
    model, keys = _auto(own).from_pretrained(
        folder,
        config=own,
        dtype=dtype,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **more,
        **plain,
    )
    audit(path, keys)
    made: PreTrainedModel = model.eval()
    return made


def own_config(config: ModelConfig) -> PreTrainedConfig:
    """transformers' configuration of the model that `config` names."""
    return tiny.build_config(config.build) if config.path is None else _config_of(locate(config.path))


def _config_of(path: Path) -> PreTrainedConfig:
    folder, more = from_pretrained_arguments(path)
    own: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **more)
    if is_gguf(path):
        gguf_config.correct(own, path)
    return own


def skeleton(config: ModelConfig, buffers: bool = False) -> PreTrainedModel:
    """The model of `config` without memory: on the meta device, from its configuration alone, in eval mode.

    buffers: these are real all the same.
    """
    own = own_config(config)
    with init_empty_weights(include_buffers=False) if buffers else torch.device("meta"):
        model: PreTrainedModel = _auto(own).from_config(own, dtype=DTYPES[config.dtype])
    if buffers:
        model.tie_weights()  # each module got a parameter of its own
        if config.path is None:
            model.to(dtype=DTYPES[config.dtype])  # as a built model's buffers are
    return model.eval()


def load_processor(config: ModelConfig, own: PreTrainedConfig) -> Any:
    """The processor of a model with the configuration `own`; a tokenizer for a text model."""
    return tiny.build_processor(own) if config.path is None else tiny.load_processor(locate(config.path))


def _auto(config: PreTrainedConfig) -> Any:
    """transformers' factory for models of this kind, with a vision tower where there is one."""
    with_images = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return AutoModelForImageTextToText if with_images else AutoModelForCausalLM


def audit(folder: Path, keys: dict[str, Any]) -> None:
    """Raise UserError unless `keys`, transformers' report of a load, says that every tensor found its place."""
    for kind, advice in (
        ("missing_keys", "the checkpoint lacks them"),
        ("unexpected_keys", "the model has no such tensors"),
        ("mismatched_keys", "shapes differ"),
        ("error_msgs", "they could not be read"),
    ):
        if found := sorted(key if isinstance(key, str) else str(key[0]) for key in keys.get(kind) or ()):
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise UserError(f"{folder}: {kind.replace('_', ' ')}: {', '.join(found[:3])}{more}: {advice}")


def prepare(model: PreTrainedModel, config: Config) -> nn.Module:
    """The model to train, in training mode: `adapt`, then `make_ready`."""
    prepared = adapt(model, config)
    make_ready(prepared, config)
    return prepared.train()


def adapt(model: PreTrainedModel, config: Config) -> nn.Module:
    """`model` itself or the PEFT model around it, in eval mode, with `config.train.trainable` as float32 masters.

    Initial adapters follow from `config.seed`. Still transformers' own computation.
    """
    adapted: nn.Module = model
    if config.train.trainable == "adapter":
        adapted = adapters.attach(model, config.adapter, config.seed)
    else:
        model.requires_grad_(True)
    precision.make_masters(adapted)
    return adapted.eval()


def make_ready(adapted: nn.Module, config: Config) -> None:
    """Let `adapted`, in eval mode, compute packs: shared prefixes, and recomputation owned by one path.

    Kernels that `config` leaves to `auto` are chosen for the device that `adapted` is on now.
    """
    found = anatomy.find(adapted)
    unit.refuse_other_recomputation(found.base)
    refuse_running_dropout(adapted)
    config = machine.settle(config, next(adapted.parameters()).device, found.base)
    patch.install(adapted, config.model.attention, config.model.deltanet, config.model.heads)
    unit.install(found, config.memory.recompute)
    unit.keep_middle(found, config.memory.keep_middle)
    unit.keep_attention(found, config.memory.keep_attention)
    if config.memory.recompute and config.memory.tile_rows:
        tiles.install(found, config.memory.tile_rows, config.model.elementwise)


def refuse_running_dropout(model: nn.Module) -> None:
    """Raise UserError for a dropout of the model's own: its masks would follow from a generator's running state."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise UserError(f"{name}: dropout {module.p} of the model itself draws unseeded masks; set it to 0")


class Out(NamedTuple):
    """loss: float32 scalar, the batch's weighted sum. each: [M], cross-entropy of each target, detached."""

    loss: Tensor
    each: Tensor


class Root(nn.Module):
    """The whole computation from a batch to its loss: what is sharded as root, so the head is in the root's group.

    images: does any example of the run have one? Then a batch without sends one blank image through the tower
    and the merger, so that every rank issues the same collectives and every parameter has a gradient.
    """

    at_once = 1
    """Packs of an update that are best given to `together`."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, chunk_rows: int, images: bool, chunk_words: int = 0
    ) -> None:
        super().__init__()
        self.model = model
        self.dtype, self.chunk_rows, self.chunk_words = dtype, chunk_rows, chunk_words
        self.anatomy = anatomy.find(model)
        unit.refuse_other_recomputation(self.anatomy.base)
        self.images = images and self.anatomy.vision is not None
        self.copies: precision.Copies | None = unit.compute_in(self.anatomy, dtype)

    def forward(self, batch: Batch, draw: str | None = None) -> Out:
        """`batch` on the model's device. draw: names (run, update, pack), from which dropout makes its masks."""
        batch.layout.draw = draw
        if self.copies is None:
            return self._run(batch)
        with self.copies:
            return self._run(batch)

    def together(self, batches: Sequence[Batch], draws: Sequence[str | None]) -> list[Out]:
        """Several packs, whose losses then go backward together."""
        return [self(batch, draw=draw) for batch, draw in zip(batches, draws, strict=True)]

    def metrics(self, seconds: float) -> dict[str, float]:
        """What an update's line of metrics.jsonl tells of this root besides; the update took so long."""
        return {}

    def _run(self, batch: Batch) -> Out:
        hidden = self.anatomy.body(**self._inputs(batch)).last_hidden_state
        head = self.anatomy.head.weight
        return Out(*target_losses(hidden.squeeze(0), batch.targets, head, self.chunk_rows, self.chunk_words))

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        """What the body is given."""
        embeddings = embed(self.anatomy.base.get_input_embeddings(), batch.input_ids)
        images: dict[str, Any] = {}
        if batch.pixel_values is not None:
            # The ids say where the images' embeddings go.
            images = {"pixel_values": batch.pixel_values, "image_grid_thw": batch.image_grid_thw}
            images |= {"input_ids": batch.input_ids}
        elif self.images:
            embeddings = embeddings + self._blank_image(batch.input_ids.device).to(embeddings.dtype)
        return {
            **images,
            "inputs_embeds": embeddings,
            "position_ids": batch.position_ids,
            "layout": batch.layout,
            "use_cache": False,
        }

    def _blank_image(self, device: torch.device) -> Tensor:
        """Scalar zero that depends on every parameter an image's embeddings depend on."""
        vision = self.anatomy.base.config.vision_config
        side = vision.spatial_merge_size
        pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        output = self.anatomy.body.get_image_features(
            torch.zeros(side * side, pixels, device=device), torch.tensor([[1, side, side]], device=device)
        )
        deeper = getattr(output, "deepstack_features", None) or ()
        features = [*output.pooler_output, *(feature for level in deeper for feature in level)]
        total: Tensor = sum((feature.sum() for feature in features), start=features[0].new_zeros(()))
        return total * 0
