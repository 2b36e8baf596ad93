"""Which classes of transformers are understood, and as what; whatever else a model holds is refused by name.

A module counts as one of the classes named here when its class, or one that it is derived from (FSDP2 derives), has
this name in this file of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.errors import UserError

LENGTH_BOUND_ROTARY = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest sequence in the buffer."""

ROUTER_LOSS = "a router's auxiliary loss depends on which tokens meet in a buffer"
"""Why router logits are refused."""

Projections = tuple[Tensor, Tensor, Tensor, Tensor]
"""mixed [1, T, C]: query, key and value before the convolution; z [1, T, HV, V]; b and a [1, T, HV]."""


class NotExact(UserError, ValueError):
    """Something that could not be computed as every example alone would compute it. Names the layer or argument."""


@dataclass(frozen=True)
class Family:
    """One family of models, by the names of its classes in the file `modeling` of transformers."""

    modeling: str
    """Module that defines the classes."""
    decoder: str
    """The stack of decoder layers: it makes the masks and the rotary embedding."""
    entrances: tuple[str, ...]
    """Models that hold the decoder and pass what they are given on to it."""
    layer: str
    """A decoder layer: one token mixer, everything else works on each token alone."""
    attention: str
    """The softmax token mixer; it calls transformers' attention interface."""
    tokenwise: tuple[str, ...]
    """Children of a layer that work on each token alone."""
    delta_net: str | None = None
    """The recurrent token mixer."""
    project: Callable[[Any, Tensor], Projections] | None = None
    """The delta net's input projections, for hidden states [1, T, hidden]."""
    three_dimensional: bool = False
    """Position ids may be [3, 1, T] (time, height, width)."""

    def kind(self, module: nn.Module) -> str:
        """Name of the module's class in this family, or of its own class where it is none of this family's."""
        names = [base.__name__ for base in type(module).__mro__ if base.__module__ == self.modeling]
        return names[0] if names else type(module).__name__


def separate_projections(module: Any, hidden: Tensor) -> Projections:
    """Qwen3.5: one matrix for query, key and value, one for each of z, b and a."""
    z = module.in_proj_z(hidden)
    z = z.view(*z.shape[:2], -1, module.head_v_dim)
    return module.in_proj_qkv(hidden), z, module.in_proj_b(hidden), module.in_proj_a(hidden)


def interleaved_projections(module: Any, hidden: Tensor) -> Projections:
    """Qwen3-Next: two matrices whose rows are grouped by key head."""
    query, key, value, z, b, a = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
    )
    return torch.cat([part.flatten(2) for part in (query, key, value)], dim=-1), z, b, a


def _plain(name: str, file: str) -> Family:
    return Family(
        modeling=f"transformers.models.{file}.modeling_{file}",
        decoder=f"{name}Model",
        entrances=(f"{name}ForCausalLM",),
        layer=f"{name}DecoderLayer",
        attention=f"{name}Attention",
        tokenwise=(f"{name}MLP", f"{name}RMSNorm"),
    )


def _qwen3_5(name: str, file: str, tokenwise: tuple[str, ...]) -> Family:
    return Family(
        modeling=f"transformers.models.{file}.modeling_{file}",
        decoder=f"{name}TextModel",
        entrances=(f"{name}Model", f"{name}ForCausalLM", f"{name}ForConditionalGeneration"),
        layer=f"{name}DecoderLayer",
        attention=f"{name}Attention",
        tokenwise=tokenwise,
        delta_net=f"{name}GatedDeltaNet",
        project=separate_projections,
        three_dimensional=True,
    )


FAMILIES: dict[str, Family] = {
    "llama": _plain("Llama", "llama"),
    "qwen3": _plain("Qwen3", "qwen3"),
    "qwen3_next": Family(
        modeling="transformers.models.qwen3_next.modeling_qwen3_next",
        decoder="Qwen3NextModel",
        entrances=("Qwen3NextForCausalLM",),
        layer="Qwen3NextDecoderLayer",
        attention="Qwen3NextAttention",
        tokenwise=("Qwen3NextMLP", "Qwen3NextSparseMoeBlock", "Qwen3NextRMSNorm"),
        delta_net="Qwen3NextGatedDeltaNet",
        project=interleaved_projections,
    ),
    "qwen3_5": _qwen3_5("Qwen3_5", "qwen3_5", ("Qwen3_5MLP", "Qwen3_5RMSNorm")),
    "qwen3_5_moe": _qwen3_5("Qwen3_5Moe", "qwen3_5_moe", ("Qwen3_5MoeSparseMoeBlock", "Qwen3_5MoeRMSNorm")),
}


@dataclass(frozen=True)
class Parts:
    """The modules of a model that matter here, by their names within it."""

    family: Family
    decoder_name: str
    decoder: PreTrainedModel
    entrances: dict[str, PreTrainedModel]
    attention: dict[str, Any]
    delta_nets: dict[str, Any]


def find_parts(model: nn.Module) -> Parts:
    """Decoder, entrances and token mixers of a model of a known family; NotExact names what is not known."""
    found = [
        (family, name, module)
        for name, module in model.named_modules()
        for family in FAMILIES.values()
        if family.kind(module) == family.decoder and _defined_in(module, family)
    ]
    if len(found) != 1:
        raise NotExact(
            f"{type(model).__name__}: {len(found)} known decoders, not 1; exact over a tree are "
            f"{', '.join(FAMILIES)}; {_first_layer(model)}"
        )
    family, decoder_name, decoder = found[0]
    entrances = {}
    for name, module in model.named_modules():
        holds_decoder = module is not decoder and any(child is decoder for child in module.modules())
        if isinstance(module, PreTrainedModel) and holds_decoder:
            if family.kind(module) not in family.entrances:
                raise NotExact(f"{name or 'the model'} ({type(module).__name__}) is not a model that is understood")
            entrances[name] = module
    attention, delta_nets = _find_mixers(family, decoder_name, decoder)
    return Parts(family, decoder_name, decoder, entrances, attention, delta_nets)


def _find_mixers(
    family: Family, decoder_name: str, decoder: PreTrainedModel
) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    attention: dict[str, nn.Module] = {}
    delta_nets: dict[str, nn.Module] = {}
    for index, layer in enumerate(decoder.layers):
        layer_name = f"{decoder_name}.layers.{index}".removeprefix(".")
        if family.kind(layer) != family.layer:
            raise NotExact(f"{layer_name}: {type(layer).__name__} is not a decoder layer that is understood")
        mixers = 0
        for child_name, child in layer.named_children():
            name, kind = f"{layer_name}.{child_name}", family.kind(child)
            if kind in (family.attention, family.delta_net):
                (attention if kind == family.attention else delta_nets)[name] = child
                mixers += 1
            elif kind not in family.tokenwise:
                raise NotExact(f"{name}: {type(child).__name__} is not a token mixer that is understood")
        if mixers != 1:
            raise NotExact(f"{layer_name} has {mixers} token mixers, not 1")
    return attention, delta_nets


def refuse_inexact(model: nn.Module, parts: Parts) -> None:
    """Raise NotExact, naming the layer, for settings of a known model that make a pack differ from its examples."""
    config = parts.decoder.config
    for name, module in {parts.decoder_name or "the model": parts.decoder, **parts.entrances}.items():
        _refuse_replaced(name, module, parts.family)
        if getattr(module.config, "output_router_logits", False):
            raise NotExact(f"{name}: config.output_router_logits: {ROUTER_LOSS}")
    for index, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
        if layer_type not in ("full_attention", "linear_attention"):
            raise NotExact(f"{parts.decoder_name}.layers.{index}: {layer_type} is not exact over a tree")
    for name, module in parts.attention.items():
        _refuse_replaced(name, module, parts.family)
        if (window := getattr(module, "sliding_window", None)) is not None:
            raise NotExact(f"{name}: a sliding window ({window} tokens) is not exact over a tree")
        if module.attention_dropout > 0:
            raise NotExact(
                f"{name}: attention_dropout {module.attention_dropout} draws other masks in a pack; set it to 0"
            )
    for name, module in parts.delta_nets.items():
        _refuse_replaced(name, module, parts.family)
        if module.activation != "silu":
            raise NotExact(f"{name}: the convolution's activation is {module.activation}; silu is understood")
    if (rotary := parts.decoder.rotary_emb.rope_type) in LENGTH_BOUND_ROTARY:
        raise NotExact(
            f"{parts.decoder_name}.rotary_emb: {rotary} frequencies depend on the longest sequence in a buffer"
        )
    if getattr(config, "is_causal", True) is False:
        raise NotExact(f"{parts.decoder_name}: config.is_causal is false; only causal models form a tree")
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "alora_invocation_tokens", None):
            raise NotExact("an adapter with alora_invocation_tokens starts at a token of each example; a pack has many")


def _refuse_replaced(name: str, module: nn.Module, family: Family) -> None:
    if "forward" in vars(module) or not _defined_in(module, family):
        raise NotExact(f"{name}: the forward of this {type(module).__name__} is not transformers' own any more")


def _defined_in(module: nn.Module, family: Family) -> bool:
    return bool(type(module).forward.__module__ == family.modeling)


def _first_layer(model: nn.Module) -> str:
    for name, stack in model.named_modules():
        if isinstance(stack, nn.ModuleList) and len(stack):
            children = ", ".join(f"{child} ({type(module).__name__})" for child, module in stack[0].named_children())
            return f"its first layer is {name}.0 ({type(stack[0]).__name__}) with {children}"
    return "it has no stack of layers"
