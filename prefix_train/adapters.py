"""LoRA through PEFT on the language model's linear modules, and the vision tower's merger trained whole."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from configs.errors import UserError
from configs.schema import AdapterConfig
from prefix_train import anatomy
from prefix_train.dropout import SeededDropout, seed_of

ADVICE = (
    "of a model of experts PEFT takes gate_proj, up_proj and down_proj for parts of the experts' fused parameters, "
    "which get no adapters here: leave these names out"
)


def attach(model: PreTrainedModel, config: AdapterConfig, seed: int) -> PeftModel:
    """`model` with adapters on `config.targets` of its language model; everything else is frozen but the mergers.

    Initial weights follow from `seed` alone. Mergers go through PEFT's `modules_to_save`, by full name, so that
    the exported adapter carries them and PEFT loads it back. Experts hold fused parameters, not linear modules, and get
    no adapter; their shared expert does. Raises UserError for a target that matches nothing or more than modules.
    """
    found = anatomy.find(model)
    names = target_names(found, config.targets)
    mergers = [anatomy.name_of(merger, model) for merger in found.mergers] if config.merger else []
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=list(names),
        modules_to_save=mergers or None,
    )
    with torch.random.fork_rng(devices=[]), old_name_in_peft():
        torch.manual_seed(seed_of(str(seed), "adapters"))
        try:
            adapted = get_peft_model(model, lora)
        except ValueError as error:
            raise UserError(
                f"adapter.targets: PEFT refuses them for this {type(model).__name__} ({error}); {ADVICE}"
            ) from error
    _refuse_other_targets(model, names)
    if config.dropout > 0:
        _seed_dropouts(adapted, config.masks == "counted")
    return adapted


@contextmanager
def old_name_in_peft() -> Iterator[None]:
    """PEFT 0.21 asks a model of transformers 5.24 by a name that is deprecated there, which its authors can change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def target_names(found: anatomy.Anatomy, targets: list[str]) -> list[str]:
    """Full names of the decoder's linear modules that end in one of `targets`, in the model's order."""
    prefix = anatomy.name_of(found.decoder, found.base)
    linear = [f"{prefix}.{name}" for name, module in found.decoder.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(_ends_in(name, target) for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            near = difflib.get_close_matches(target.rpartition(".")[2], known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(
                f"adapter.targets: {target!r} is no linear module of the language model; {hint}"
                f"It has {', '.join(known)}"
            )
    return [name for name in linear if any(_ends_in(name, target) for target in targets)]


def _refuse_other_targets(model: PreTrainedModel, names: list[str]) -> None:
    """Raise UserError unless PEFT adapted just these modules: it takes some names for parts of fused experts."""
    adapted = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    if wrong := sorted(adapted.symmetric_difference(names)):
        raise UserError(
            f"adapter.targets: PEFT does not adapt what they name in this {type(model).__name__} (see {wrong[0]}); "
            f"{ADVICE}"
        )


def _ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def _seed_dropouts(adapted: PeftModel, counted: bool) -> None:
    """Replace PEFT's dropouts, which draw from the running generator, by seeded ones."""
    for name, module in adapted.named_modules():
        if isinstance(module, LoraLayer):
            for adapter, dropout in module.lora_dropout.items():
                module.lora_dropout[adapter] = SeededDropout(dropout.p, name, counted)
