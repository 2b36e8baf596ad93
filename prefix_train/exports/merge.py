"""A run's whole model, adapters merged, in transformers' format: block after block, never in memory whole.

A merged weight is W + scaling B A, computed in float32 and rounded once, if at all: what transformers keeps in float32
(the decays of OLMo-Hybrid) is written so. W is what training computed with: the tensor
of `model.path` in `model.dtype`, or for `weights="store"` the one of the streaming engine's store, dequantised.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

from configs.errors import UserError
from configs.modelpath import is_gguf, locate
from configs.schema import Config, ModelConfig
from prefix_train import anatomy, checkpoint, engines, export
from prefix_train import model as models
from prefix_train.exports.shards import Shards
from prefix_train.stream import engine, places, sources
from prefix_train.stream.build import as_bytes
from prefix_train.stream.manifest import BlockFile, Stored
from prefix_train.stream.store import Store, unpack
from prefix_train.tensors import TensorError, check_names, check_shapes, digest

Dtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True)
class Merging:
    """How a merged model is made. weights: where those that were not trained come from. dtype: of the files; none: the
    run's `model.dtype`. shard_bytes: most bytes of tensors in one file.
    """

    weights: Literal["model", "store"] = "model"
    dtype: Dtype | None = None
    shard_bytes: int = 5 * 10**9


PEFT = "base_model.model."
"""What PEFT puts before a model's own names."""


@dataclass(frozen=True)
class Lora:
    """A weight gets `scaling` x `b` @ `a` added, trained tensors by name."""

    a: str
    b: str
    scaling: float


@dataclass(frozen=True)
class Whole:
    """A weight is replaced by the trained tensor of this name."""

    name: str


Change = Lora | Whole


class Trained(Mapping[str, Tensor]):
    """The trained tensors of a checkpoint, each read when it is asked for, on the CPU.

    wanted: parameters with the names and shapes that it must have. Raises TensorError where it has others.
    """

    def __init__(self, folder: Path, wanted: Mapping[str, Tensor]) -> None:
        checkpoint.verify(folder)
        self._file: Any = safe_open(folder / checkpoint.MODEL, framework="pt")
        self._names = sorted(wanted)
        check_names(str(folder), self._file.keys(), wanted)  # type: ignore[no-untyped-call]
        check_shapes(str(folder), self._file, wanted)

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._file.get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def export_merged(config: Config, newest: Path, folder: Path, merging: Merging) -> export.Exported:
    """Write the model of the checkpoint `newest` of a run with `config` into `folder`, whole or not at all.

    Everything is read back as transformers would load it and compared. Raises UserError where the weights are not to
    be had or the disk cannot hold the model, TensorError where something is not what was trained or not finite.
    """
    written = replace(config.model, dtype=merging.dtype or config.model.dtype)
    skeleton = models.skeleton(written)
    dtypes = dtypes_of(skeleton)
    adapted = models.adapt(models.skeleton(config.model), config)
    trained = Trained(newest, anatomy.trainable(adapted))
    changes = changes_of(adapted, trained)
    blocks = of_store(config) if merging.weights == "store" else of_path(config.model)
    with export.writing(folder), export.aside(folder) as made:
        shards = Shards(made, disk_layout(skeleton), merging.shard_bytes)
        hashes: dict[str, str] = {}
        for block in blocks:
            merged = {name: merge(name, read, changes.pop(name, None), trained, dtypes[name]) for name, read in block}
            hashes |= {name: _hash(tensor) for name, tensor in merged.items()}
            for name, tensor in revert_weight_conversion(skeleton, merged).items():
                shards.write(name, tensor)
        if changes:
            raise TensorError(f"{folder}: {min(changes)} was trained and is no tensor of the model")
        shards.finish()
        _write_rest(written, skeleton, made)
        _read_back(made, written.dtype, hashes)
        done = export.Exported(folder, digest(trained), len(hashes), shards.parameters)
        export.write_record(made, done, kind="merged", weights=merging.weights)
    return done


def changes_of(adapted: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, Change]:
    """What training did to each tensor of the model that it changed, by the model's own name.

    adapted: the prepared model, perhaps on the meta device. Raises TensorError for a trained tensor without a place.
    """
    changes: dict[str, Change] = {}
    for name, module in adapted.named_modules():
        if isinstance(module, LoraLayer):
            (adapter,) = module.active_adapters
            if module.lora_variant or module.lora_bias[adapter] or module.fan_in_fan_out:
                raise TensorError(f"{name}: only plain LoRA can be merged")
            a, b = (f"{name}.{part}.{adapter}.weight" for part in ("lora_A", "lora_B"))
            changes[f"{name.removeprefix(PEFT)}.weight"] = Lora(a, b, float(module.scaling[adapter]))
        elif isinstance(module, ModulesToSaveWrapper):
            (adapter,) = module.active_adapters
            for inner, _ in module.modules_to_save[adapter].named_parameters():
                whole = f"{name}.modules_to_save.{adapter}.{inner}"
                changes[f"{name.removeprefix(PEFT)}.{inner}"] = Whole(whole)
    if not changes:
        changes = {name: Whole(name) for name in trained}
    used = [part for one in changes.values() for part in ([one.name] if isinstance(one, Whole) else [one.a, one.b])]
    check_names("what can be merged", used, trained)
    return changes


def merge(
    name: str, read: Callable[[], Tensor], change: Change | None, trained: Mapping[str, Tensor], dtype: torch.dtype
) -> Tensor:
    """One tensor of the merged model in `dtype`; `read` gives the one before training. TensorError if not finite."""
    if isinstance(change, Whole):
        found = trained[change.name]
    elif isinstance(change, Lora):
        found = read().to(torch.float32, copy=True)
        found += (trained[change.b].float() @ trained[change.a].float()) * change.scaling
    else:
        found = read()
    if change is not None and not bool(torch.isfinite(found).all()):
        raise TensorError(f"{name}: a merged weight is not finite")
    return found.to(dtype)


Block = Iterator[tuple[str, Callable[[], Tensor]]]
"""Tensors of one part of a model: each one's full name, and what reads it."""


def of_path(config: ModelConfig) -> Iterator[Block]:
    """The model as a run with `config` loads it, block after block. UserError as `sources.open_source` raises it."""
    source = sources.open_source(config)
    blocks = places.place(source.model, places.Choice("plain", models.DTYPES[config.dtype]))
    return (_tensors(source, block) for block in blocks)


def _tensors(source: sources.Source, block: BlockFile) -> Block:
    for stored in block.tensors:
        yield f"{block.module}.{stored.name}", partial(_read, source, block, stored)


def _read(source: sources.Source, block: BlockFile, stored: Stored) -> Tensor:
    return source.parts(block, stored)["data"]


def of_store(config: Config) -> Iterator[Block]:
    """The model as the streaming engine computes with it. UserError where the store is not this model's."""
    if config.engine != "stream":
        raise UserError("--weights store: the run has none, it trained with engine=sharded; leave it out")
    store = engines.open_store(config, every_byte=True)
    engine.load(config.model, store)  # says so where the store is another model's
    return (_unpacked(store, block) for block in store.blocks)


def _unpacked(store: Store, block: BlockFile) -> Block:
    mapped = store.bytes(block)
    for stored in block.tensors:
        yield f"{block.module}.{stored.name}", partial(unpack, stored, mapped)


def dtypes_of(skeleton: PreTrainedModel) -> dict[str, torch.dtype]:
    """Of each tensor by its name: the model's dtype, or float32 where transformers keeps it so whatever that is."""
    return {name: tensor.dtype for name, tensor in skeleton.state_dict().items()}


def disk_layout(skeleton: PreTrainedModel) -> dict[str, Tensor]:
    """Names, shapes and dtypes as which transformers stores the model, on the meta device, without a tied head."""
    state = {
        f"{block.module}.{stored.name}": torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        for block in places.place(skeleton, places.Choice("plain", skeleton.dtype))
        for stored in block.tensors
    }
    # In the order in which transformers fills the files of a model that it has loaded.
    ordered = dict(sorted(state.items(), key=lambda entry: dot_natural_key(entry[0])))
    found: dict[str, Tensor] = revert_weight_conversion(skeleton, ordered)
    return found


def _write_rest(config: ModelConfig, skeleton: PreTrainedModel, folder: Path) -> None:
    """Configuration, generation settings, tokenizer or processor, chat template."""
    own = skeleton.config
    own.dtype, own.architectures = config.dtype, [type(skeleton).__name__]
    own.save_pretrained(folder)
    place = None if config.path is None else locate(config.path)
    source = None if place is None or is_gguf(place) else place
    settings = None if source is None else source / "generation_config.json"
    if settings is not None and settings.is_file():
        shutil.copyfile(settings, folder / settings.name)
    elif skeleton.generation_config is not None:
        skeleton.generation_config.save_pretrained(folder)
    export.write_processor(models.load_processor(config, own), folder, source)


def _read_back(folder: Path, dtype: Dtype, written: Mapping[str, str]) -> None:
    """Raise TensorError unless transformers' rules of loading give back exactly what was written."""
    model = ModelConfig(path=str(folder), dtype=dtype)
    found = {name: _hash(read()) for block in of_path(model) for name, read in block}
    check_names(str(folder), found, written)
    for name, hashed in written.items():
        if found[name] != hashed:
            raise TensorError(f"{folder}: {name} is not what was written")


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(as_bytes(tensor)).hexdigest()
