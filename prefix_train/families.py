"""Which classes of transformers are understood, and as what; whatever else a model holds is refused by name.

A module counts as one of the classes named here when its class, or one that it is derived from (FSDP2 derives), has
this name in this file of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.errors import UserError

LENGTH_BOUND_ROTARY = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the longest sequence in the buffer."""

ROUTER_LOSS = "a router's auxiliary loss depends on which tokens meet in a buffer"
"""Why router logits are refused."""

Projections = tuple[Tensor, Tensor, Tensor, Tensor]
"""mixed [1, T, C]: query, key and value before the convolution; gate z [1, T, HV, V]; beta and a [1, T, HV]."""


class NotExact(UserError, ValueError):
    """Something that could not be computed as every example alone would compute it. Names the layer or argument."""


@dataclass(frozen=True)
class DeltaNet:
    """The recurrent token mixer of a family: a class, and how its parts are called."""

    name: str
    project: Callable[[Any, Tensor], Projections]
    """Its input projections, for hidden states [1, T, hidden]."""
    norm: str = "norm"
    """Its gated norm of heads."""
    out: str = "out_proj"


@dataclass(frozen=True)
class Family:
    """One family of models, by the names of its classes in the file `modeling` of transformers."""

    modeling: str
    """Module that defines the classes."""
    decoder: str
    """The stack of decoder layers: it makes the masks and the rotary embedding."""
    entrances: tuple[str, ...]
    """Models that hold the decoder and pass what they are given on to it."""
    layers: tuple[str, ...]
    """Decoder layers: one token mixer in each, everything else works on each token alone."""
    attention: str
    """The softmax token mixer; it calls transformers' attention interface."""
    tokenwise: tuple[str, ...]
    """Children of a layer that work on each token alone."""
    delta_net: DeltaNet | None = None
    """The recurrent token mixer."""
    three_dimensional: bool = False
    """Position ids may be [3, 1, T] (time, height, width)."""
    window_of_config: bool = False
    """The softmax mixer takes its sliding window from the configuration when it runs."""
    one_input: str | None = None
    """The entrance that refuses embeddings beside the ids that say where the images' go."""
    between_layers: str | None = None
    """The decoder's method that adds features of images to what its first layers put out: hidden states [1, T, hidden],
    a mask [1, T] of the images' positions, features [images' positions, hidden]."""

    def kind(self, module: nn.Module) -> str:
        """Name of the module's class in this family, or of its own class where it is none of this family's."""
        names = [base.__name__ for base in type(module).__mro__ if base.__module__ == self.modeling]
        return names[0] if names else type(module).__name__


def separate_projections(module: Any, hidden: Tensor) -> Projections:
    """Qwen3.5: one matrix for query, key and value, one for each of z, b and a."""
    z = module.in_proj_z(hidden)
    z = z.view(*z.shape[:2], -1, module.head_v_dim)
    return module.in_proj_qkv(hidden), z, module.in_proj_b(hidden).sigmoid(), module.in_proj_a(hidden)


def interleaved_projections(module: Any, hidden: Tensor) -> Projections:
    """Qwen3-Next: two matrices whose rows are grouped by key head."""
    query, key, value, z, b, a = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
    )
    return torch.cat([part.flatten(2) for part in (query, key, value)], dim=-1), z, b.sigmoid(), a


def olmo_projections(module: Any, hidden: Tensor) -> Projections:
    """OLMo-Hybrid: a matrix for each; with `allow_neg_eigval` beta is up to 2, so that a state may change its sign."""
    mixed = torch.cat([module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)], dim=-1)
    beta = module.b_proj(hidden).sigmoid()
    z = module.g_proj(hidden)
    z = z.view(*z.shape[:2], -1, module.head_v_dim)
    return mixed, z, beta * 2.0 if module.allow_neg_eigval else beta, module.a_proj(hidden)


def _plain(name: str, file: str, *more: str, feed_forward: str = "MLP", window_of_config: bool = False) -> Family:
    """Attention and one feed-forward. more: other parts of a layer that work on each token alone."""
    return Family(
        modeling=f"transformers.models.{file}.modeling_{file}",
        decoder=f"{name}Model",
        entrances=(f"{name}ForCausalLM",),
        layers=(f"{name}DecoderLayer",),
        attention=f"{name}Attention",
        tokenwise=(f"{name}{feed_forward}", f"{name}RMSNorm", *more),
        window_of_config=window_of_config,
    )


def _qwen3_5(name: str, file: str, feed_forward: str) -> Family:
    return Family(
        modeling=f"transformers.models.{file}.modeling_{file}",
        decoder=f"{name}TextModel",
        entrances=(f"{name}Model", f"{name}ForCausalLM", f"{name}ForConditionalGeneration"),
        layers=(f"{name}DecoderLayer",),
        attention=f"{name}Attention",
        tokenwise=(f"{name}{feed_forward}", f"{name}RMSNorm"),
        delta_net=DeltaNet(f"{name}GatedDeltaNet", separate_projections),
        three_dimensional=True,
    )


def _qwen3_vl(name: str, file: str, *more: str) -> Family:
    return Family(
        modeling=f"transformers.models.{file}.modeling_{file}",
        decoder=f"{name}TextModel",
        entrances=(f"{name}Model", f"{name}ForConditionalGeneration"),
        layers=(f"{name}TextDecoderLayer",),
        attention=f"{name}TextAttention",
        tokenwise=(f"{name}TextMLP", f"{name}TextRMSNorm", *more),
        three_dimensional=True,
        one_input=f"{name}Model",
        between_layers="_deepstack_process",
    )


FAMILIES: dict[str, Family] = {
    "llama": _plain("Llama", "llama"),
    "mistral": _plain("Mistral", "mistral", window_of_config=True),
    "mixtral": _plain("Mixtral", "mixtral", feed_forward="SparseMoeBlock", window_of_config=True),
    "smollm3": _plain("SmolLM3", "smollm3"),
    "olmo2": _plain("Olmo2", "olmo2"),
    "olmo3": _plain("Olmo3", "olmo3"),
    "olmo_hybrid": Family(
        modeling="transformers.models.olmo_hybrid.modeling_olmo_hybrid",
        decoder="OlmoHybridModel",
        entrances=("OlmoHybridForCausalLM",),
        layers=("OlmoHybridAttentionDecoderLayer", "OlmoHybridLinearAttentionDecoderLayer"),
        attention="OlmoHybridAttention",
        tokenwise=("OlmoHybridMLP", "OlmoHybridRMSNorm"),
        delta_net=DeltaNet("OlmoHybridGatedDeltaNet", olmo_projections, norm="o_norm", out="o_proj"),
    ),
    "qwen2": _plain("Qwen2", "qwen2"),
    "qwen3": _plain("Qwen3", "qwen3"),
    "qwen3_moe": _plain("Qwen3Moe", "qwen3_moe", "Qwen3MoeSparseMoeBlock"),
    "qwen3_vl": _qwen3_vl("Qwen3VL", "qwen3_vl"),
    "qwen3_vl_moe": _qwen3_vl("Qwen3VLMoe", "qwen3_vl_moe", "Qwen3VLMoeTextSparseMoeBlock"),
    "qwen3_next": Family(
        modeling="transformers.models.qwen3_next.modeling_qwen3_next",
        decoder="Qwen3NextModel",
        entrances=("Qwen3NextForCausalLM",),
        layers=("Qwen3NextDecoderLayer",),
        attention="Qwen3NextAttention",
        tokenwise=("Qwen3NextMLP", "Qwen3NextSparseMoeBlock", "Qwen3NextRMSNorm"),
        delta_net=DeltaNet("Qwen3NextGatedDeltaNet", interleaved_projections),
    ),
    "qwen3_5": _qwen3_5("Qwen3_5", "qwen3_5", "MLP"),
    "qwen3_5_moe": _qwen3_5("Qwen3_5Moe", "qwen3_5_moe", "SparseMoeBlock"),
}


class Norms(NamedTuple):
    """Children of a layer: what its mixer or its feed-forward reads through, and what the residual sum does; none: as
    it is."""

    before: str | None
    behind: str | None


BEFORE = Norms("input_layernorm", None), Norms("post_attention_layernorm", None)
BEHIND = Norms(None, "post_attention_layernorm"), Norms(None, "post_feedforward_layernorm")

HALVES: dict[str, tuple[Norms, Norms]] = {
    "LlamaDecoderLayer": BEFORE,
    "MistralDecoderLayer": BEFORE,
    "MixtralDecoderLayer": BEFORE,
    "Olmo2DecoderLayer": BEHIND,
    "Olmo3DecoderLayer": BEHIND,
    "OlmoHybridAttentionDecoderLayer": BEHIND,
    "OlmoHybridLinearAttentionDecoderLayer": BEFORE,
    "Qwen2DecoderLayer": BEFORE,
    "Qwen3DecoderLayer": BEFORE,
    "Qwen3MoeDecoderLayer": BEFORE,
    "Qwen3NextDecoderLayer": BEFORE,
    "Qwen3VLMoeTextDecoderLayer": BEFORE,
    "Qwen3VLTextDecoderLayer": BEFORE,
    "Qwen3_5DecoderLayer": BEFORE,
    "Qwen3_5MoeDecoderLayer": BEFORE,
    "SmolLM3DecoderLayer": BEFORE,
}
"""Layers whose forward is two sums: the input and its mixer (`self_attn`, `linear_attn`), these and the `mlp`."""


def norms_of_halves(forward: Callable[..., Any]) -> tuple[Norms, Norms] | None:
    """Norms of the two sums that a layer's own forward is; None for a forward that is not known as such."""
    owner, _, method = getattr(forward, "__qualname__", "").partition(".")
    known = any(getattr(forward, "__module__", None) == family.modeling for family in FAMILIES.values())
    return HALVES.get(owner) if known and method == "forward" else None


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
        what = "is of no family that is known to be exact over a tree" if not found else "holds several language models"
        raise NotExact(f"{type(model).__name__} {what}; {_first_layer(model)}; known are {', '.join(FAMILIES)}")
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
        if family.kind(layer) not in family.layers:
            raise NotExact(f"{layer_name}: {type(layer).__name__} is not a decoder layer that is understood")
        mixers = 0
        for child_name, child in layer.named_children():
            name, kind = f"{layer_name}.{child_name}", family.kind(child)
            if kind == family.attention:
                attention[name] = child
                mixers += 1
            elif family.delta_net is not None and kind == family.delta_net.name:
                delta_nets[name] = child
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
    _refuse_noise(parts)
    for name, module in parts.attention.items():
        _refuse_attention(name, module, parts.family)
    for name, module in parts.delta_nets.items():
        _refuse_replaced(name, module, parts.family)
        if module.activation != "silu":
            raise NotExact(f"{name}: the convolution's activation is {module.activation}; silu is understood")
    _refuse_rotary(f"{parts.decoder_name}.rotary_emb", parts.decoder.rotary_emb)
    if getattr(config, "is_causal", True) is False:
        raise NotExact(f"{parts.decoder_name}: config.is_causal is false; only causal models form a tree")
    for adapter in getattr(model, "peft_config", {}).values():
        if getattr(adapter, "alora_invocation_tokens", None):
            raise NotExact("an adapter with alora_invocation_tokens starts at a token of each example; a pack has many")


def _refuse_attention(name: str, module: Any, family: Family) -> None:
    _refuse_replaced(name, module, family)
    window = module.config.sliding_window if family.window_of_config else getattr(module, "sliding_window", None)
    if window is not None:
        raise NotExact(
            f"{name}: a sliding window ({window} tokens) is not exact over a tree; for a model that does without one, "
            "config.json says sliding_window: null"
        )
    if module.attention_dropout > 0:
        raise NotExact(f"{name}: attention_dropout {module.attention_dropout} draws other masks in a pack; set it to 0")


def _refuse_noise(parts: Parts) -> None:
    """Mixtral can multiply what its router sees by noise."""
    for name, module in parts.decoder.named_modules():
        if noise := getattr(module, "jitter_noise", 0.0):
            where = f"{parts.decoder_name}.{name}".removeprefix(".")
            raise NotExact(f"{where}: router_jitter_noise {noise} draws other noise in a pack; set it to 0")


def _refuse_rotary(name: str, rotary: Any) -> None:
    """rotary: None where a model has none; OLMo-3's has a kind of frequencies for each kind of layer."""
    if rotary is None:
        return
    kinds = rotary.rope_type.values() if isinstance(rotary.rope_type, dict) else [rotary.rope_type]
    for kind in kinds:
        if kind in LENGTH_BOUND_ROTARY:
            raise NotExact(f"{name}: {kind} frequencies depend on the longest sequence in a buffer")


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
