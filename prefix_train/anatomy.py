"""Where the parts of a (vision-)language model are, whatever wraps it: found by role, not by class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Anatomy:
    """The modules of `base`, a transformers model with a language head.

    body: everything but the head. decoder: the language model in it, with its layers. vision: the tower, where there
    is one, with its blocks; its mergers turn what the blocks give into embeddings of the language model.
    """

    base: PreTrainedModel
    body: PreTrainedModel
    decoder: PreTrainedModel
    layers: Sequence[nn.Module]
    head: nn.Linear
    vision: PreTrainedModel | None
    blocks: Sequence[nn.Module]
    mergers: Sequence[nn.Module]

    @property
    def units(self) -> tuple[nn.Module, ...]:
        """Modules that are sharded, gathered and cast each on its own; all the rest goes with the root."""
        return (*self.layers, *self.blocks)


def find(model: nn.Module) -> Anatomy:
    """Anatomy of a transformers model, bare or wrapped by PEFT.

    Raises ValueError where it has no language head or no list of layers.
    """
    base: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
    head, decoder = base.get_output_embeddings(), base.get_decoder()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"{type(base).__name__} has no linear language head")
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise ValueError(f"{type(decoder).__name__} has no list of layers")
    if getattr(head, "bias", None) is not None:
        raise ValueError(f"{type(base).__name__}: a language head with a bias is not supported")
    tower = base.get_encoder("image")
    vision = tower if tower is not base and hasattr(tower, "blocks") else None
    mergers = tuple(_mergers(vision)) if vision is not None else ()
    blocks = tuple(vision.blocks) if vision is not None else ()
    return Anatomy(base, base.base_model, decoder, tuple(decoder.layers), head, vision, blocks, mergers)


def _mergers(vision: nn.Module) -> Iterator[nn.Module]:
    for name, child in vision.named_children():
        if "merger" in name:
            yield from child if isinstance(child, nn.ModuleList) else [child]


def name_of(module: nn.Module, root: nn.Module) -> str:
    """Dotted name of `module` below `root`."""
    name: str = next(name for name, candidate in root.named_modules() if candidate is module)
    return name


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter that is trained, once, by the name that transformers or PEFT gives it."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
