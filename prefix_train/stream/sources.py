"""Where a store's weights come from: tensors of a model, one at a time, as transformers would have loaded them."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.integrations.gguf import (
    GgufHeader,
    get_gguf_conversion_mapping,
    get_gguf_plan,
    is_gguf_arch_supported,
    load_gguf_state_dict,
)
from transformers.integrations.gguf.utils import add_gguf_load_ops
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from configs.errors import UserError
from configs.modelpath import is_gguf, locate
from configs.schema import ModelConfig
from prefix_train import geometry, gguf_config, model, tiny
from prefix_train.stream import origin, places
from prefix_train.stream.origin import files_of, identify
from prefix_train.stream.places import Parts, parts_of_weight
from prefix_train.stream.store import Store


@dataclass(frozen=True)
class Source:
    """A model on the meta device, and how to get the parts of a tensor of a store from it, in the order of the files.

    identity: says which weights these are, the same on every machine. stamp: changes when their files do. workers:
    how many files of the store may be made at once.
    """

    model: PreTrainedModel
    parts: Parts
    identity: dict[str, Any]
    stamp: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()
    workers: int = 1


Read = Callable[[str], Tensor]
"""A parameter by its full name in the model."""


def open_source(config: ModelConfig) -> Source:
    """The weights that a run with `config` would load. UserError where a tensor is missing, or one is too many."""
    geometry.read_config(config)  # says in one line what is no model
    if config.path is None:
        return of_model(tiny.build_model(config.build, config.seed, model.DTYPES[config.dtype]), identify(config))
    skeleton, path, files = model.skeleton(config), locate(config.path), files_of(config)
    if (quantised := getattr(skeleton.config, "quantization_config", None)) is not None:
        kind = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise UserError(f"{path} is quantised already ({kind}); give the model in 16 or 32 bits")
    read = _gguf(path, skeleton) if is_gguf(path) else _safetensors(files, skeleton)
    stamp = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    return Source(skeleton, parts_of_weight(read), identify(config), stamp)


def require_same(store: Store, config: ModelConfig) -> None:
    """`origin.require_same` of an open store."""
    origin.require_same(store.folder, store.manifest.source, config)


def of_model(built: PreTrainedModel, identity: dict[str, Any]) -> Source:
    """A model that is in memory."""
    return Source(built, parts_of_weight(built.state_dict().__getitem__), identity)


def _safetensors(files: list[Path], skeleton: PreTrainedModel) -> Read:
    """Reads what transformers would load for a parameter, under the names and conversions of its own loader."""
    opened: dict[str, tuple[Path, Any]] = {}
    for path in files:
        try:
            file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read as safetensors: {error}") from error
        opened |= dict.fromkeys(file.keys(), (path, file))

    def get(key: str) -> Tensor:
        path, file = opened[key]
        try:
            tensor: Tensor = file.get_tensor(key)
            return tensor
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: {key} cannot be read: {error}") from error

    def cast(key: str) -> Tensor:
        return get(key).to(skeleton.dtype)

    transforms = get_model_conversion_mapping(skeleton)
    return _converted(skeleton, opened, get, cast, transforms, files[0].parent)


def _converted(
    skeleton: PreTrainedModel, keys: Iterable[str], get: Read, part: Read, transforms: Sequence[Any], where: Path
) -> Read:
    """Reads a parameter of what the tensors `keys` hold, by renamings and conversions of transformers.

    get: a tensor that is a parameter. part: one that conversions make parameters of.
    """
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = skeleton.state_dict(), skeleton.base_model_prefix
    wanted: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for key in sorted(keys, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if target not in state and key in state:
            target, pattern = rename_source_key(key, [], [], prefix, state)
        wanted[target].append((key, pattern))

    def read(name: str) -> Tensor:
        (key, pattern), *others = wanted[name]
        if pattern is None:
            if others:
                raise UserError(f"{where}: {key} and {others[0][0]} are both {name}")
            return get(key).to(state[name].dtype)
        converter = copy.deepcopy(converter_of[pattern])
        for source, source_pattern in wanted[name]:
            converter.add_tensor(name, source, source_pattern, lambda source=source: part(source))
        made: Any = converter.convert(name, model=skeleton, config=skeleton.config)[name]
        tensor: Tensor = made[0] if isinstance(made, list) else made  # as transformers' loader takes it
        return tensor

    return _audited(skeleton, set(wanted), read, where)


def _gguf(path: Path, skeleton: PreTrainedModel) -> Read:
    """Reads and dequantises one tensor of a GGUF file, as transformers does it for all of them at once."""
    kind = gguf_config.architecture(path)
    if is_gguf_arch_supported(kind):
        header = GgufHeader.from_file(str(path))
        mapping = get_gguf_conversion_mapping(kind, skeleton.config)
        quantised, _, _ = get_gguf_plan(header, mapping)
        transforms = add_gguf_load_ops(mapping, quantised, header, skeleton.dtype)
        tensors = load_gguf_state_dict(header)

        def get(key: str) -> Tensor:
            tensor: Tensor = tensors[key][...]
            return tensor

        return _converted(skeleton, tensors, get, get, transforms, path)
    file = gguf_config.reader()(path)
    from gguf import dequantize

    processor = TENSOR_PROCESSORS.get(kind, TensorProcessor)(config=skeleton.config.to_dict())
    names = get_gguf_hf_weights_map(skeleton, processor)
    found: dict[str, list[Any]] = defaultdict(list)
    for tensor in sorted(file.tensors, key=lambda tensor: tensor.name):
        # Parameters of experts have no suffix; gate comes before up in the one that holds both.
        if name := names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight")):
            found[name].append(tensor)

    def read(name: str) -> Tensor:
        parts = [
            processor.process(weights=dequantize(tensor.data, tensor.tensor_type), name=tensor.name).weights.copy()
            for tensor in found[name]
        ]
        whole = torch.from_numpy(parts[0]) if len(parts) == 1 else torch.cat([*map(torch.from_numpy, parts)], dim=1)
        return whole.to(skeleton.dtype)

    return _audited(skeleton, set(found), read, path)


def _audited(skeleton: PreTrainedModel, found: set[str], read: Read, where: Path) -> Read:
    """`read`, once it is known that the source has every tensor of the model and no other.

    A tied weight may be there under either name or both, if the two are equal.
    """
    names = {} if (tied := places.tied(skeleton)) is None else dict.fromkeys(tied)
    have = [name for name in names if name in found]
    if len(have) == 2 and not torch.equal(read(have[0]), read(have[1])):
        raise UserError(f"{where}: {have[0]} and {have[1]} differ, but the configuration ties them")
    if have:
        found = found | set(names)
    ignored = [re.compile(pattern) for pattern in skeleton._keys_to_ignore_on_load_unexpected or ()]
    state = set(skeleton.state_dict())
    unexpected = [name for name in found - state if not any(pattern.search(name) for pattern in ignored)]
    model.audit(where, {"missing_keys": state - found, "unexpected_keys": unexpected})
    return lambda name: read(have[0] if name in names else name)
