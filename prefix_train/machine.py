"""The machine that kernels are chosen for, where torch can be asked."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from configs.schema import Config
from prefix_train import kernel_choice
from prefix_train.geometry import Geometry
from prefix_train.kernel_choice import Kernels, Machine, Model

_machines: dict[torch.device, Machine] = {}


def of(device: torch.device) -> Machine:
    """What `device` is, and what this process can import."""
    if device not in _machines:
        there = device.type == "cuda" and torch.cuda.is_available()
        capability = torch.cuda.get_device_capability(device) if there else None
        _machines[device] = Machine(device.type, capability, kernel_choice.importable())
    return _machines[device]


def chosen(config: Config, device: torch.device, geometry: Geometry | None = None) -> Kernels:
    """See `kernel_choice.choose`."""
    return kernel_choice.choose(config, of(device), geometry)


def settle(config: Config, device: torch.device, model: PreTrainedModel | None = None) -> Config:
    """See `kernel_choice.settle`. model: that `config` names, where it is there already."""
    there = of(device)
    read = model is not None and there.gpu
    return kernel_choice.settle(config, there, Geometry.of(model.config.to_dict()) if read and model else None)


def model(dtype: torch.dtype, head_size: int = 0, width: int = 0) -> Model:
    """What kernels of attention or of Gated DeltaNet ask of a model, of its tensors."""
    return Model(str(dtype).removeprefix("torch."), head_size, width)
