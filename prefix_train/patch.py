"""Makes an unmodified transformers model compute over a forest of segments, exactly.

A patch is data: (object, attribute, replacement), set on instances, never on classes, so that another model of the same
class is untouched and undoing restores the model to the byte. `families` names the models that are understood, `inputs`
the arguments; everything else is refused by name.

The layout is an argument of the model's forward. transformers passes it on as a keyword to each decoder layer and from
there to each token mixer, so that a recomputed layer sees the layout that it was first computed with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from configs.wording import counted
from prefix_train import attention as attention_kernels
from prefix_train import deltanet as deltanet_kernels
from prefix_train import fused, inputs
from prefix_train import heads as heads_kernels
from prefix_train.families import NotExact, Parts, find_parts, refuse_inexact
from prefix_train.layout import Layout

ATTENTION_NAME = "shared_prefix"
"""Name of tree attention among transformers' attention implementations. It has no mask function: no mask is built."""


class Patch:
    """`holder.name = replacement`, in the instance's own dictionary, and its undoing."""

    __slots__ = ("holder", "name", "original", "replacement")

    _absent = object()

    def __init__(self, holder: object, name: str, replacement: object) -> None:
        self.holder, self.name, self.replacement = holder, name, replacement
        self.original: object = vars(holder).get(name, self._absent)

    @property
    def in_place(self) -> bool:
        """Is the replacement what the object holds?"""
        return vars(self.holder).get(self.name) is self.replacement

    def apply(self) -> None:
        """Put the replacement into the object."""
        vars(self.holder)[self.name] = self.replacement

    def undo(self) -> None:
        """Put back what was there."""
        if self.original is self._absent:
            del vars(self.holder)[self.name]
        else:
            vars(self.holder)[self.name] = self.original


class Mixer:
    """What a patched token mixer knows: its name, and the handle that it reports to."""

    __slots__ = ("handle", "name")

    def __init__(self, name: str, handle: Handle) -> None:
        self.name, self.handle = name, handle

    def admit(self, layout: object, length: int) -> Layout:
        """The layout that reached this layer, recorded; NotExact where it is none or not one of `length` tokens."""
        if not isinstance(layout, Layout):
            raise NotExact(f"{self.name}: no layout reached this layer; what calls it dropped the keyword `layout`")
        if layout.total != length:
            raise NotExact(f"{self.name}: the layout has {counted(layout.total, 'token')}, this layer's input {length}")
        self.handle.reached[self.name] = layout
        return layout


class Handle:
    """An installed patch. `remove()` undoes it.

    attention, deltanet, heads: kernels as asked for. parts: the modules that are patched. patches: what was replaced.
    by_layers: somebody else runs the decoder's layers one by one and checks what reached them.
    """

    def __init__(self, model: nn.Module, parts: Parts, attention: str, deltanet: str, heads: str) -> None:
        self.model, self.parts = model, parts
        self.attention, self.deltanet, self.heads = attention, deltanet, heads
        self.reached: dict[str, Layout] = {}
        self.ids: Tensor | None = None
        self.by_layers = False
        self.probing = False
        self.patches = self._plan()

    def install(self) -> None:
        """Apply every patch and probe; a failure leaves the model as it was."""
        for patch in self.patches:
            patch.apply()
        try:
            self.probe()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Undo every patch; RuntimeError, and nothing undone, where somebody else replaced one of them since."""
        for patch in self.patches:
            if not patch.in_place:
                holder = type(patch.holder).__name__
                raise RuntimeError(f"{holder}.{patch.name} was replaced after shared_prefix; undo that first")
        for patch in reversed(self.patches):
            patch.undo()

    def probe(self) -> None:
        """Run a forest of four tokens through the model with mixers that only report; NotExact unless all do.

        Costs four rows of the token-wise layers; leaves parameters, gradients and random states alone.
        """
        layout = Layout.from_tree(lengths=[2, 1, 1], parents=[-1, 0, 0])
        device = next(self.parts.decoder.parameters()).device
        layout = layout.to(device)
        self.probing = True
        try:
            with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
                self.model(
                    input_ids=torch.zeros(1, 4, dtype=torch.int64, device=device),
                    position_ids=layout.position_ids(),
                    layout=layout,
                    use_cache=False,
                )
        finally:
            self.probing = False

    def check_reached(self, layout: Layout, index: int | None = None) -> None:
        """Raise NotExact unless exactly this layout reached every mixer (of layer `index`) since the forward began."""
        within = "" if index is None else f"{self.parts.decoder_name}.layers.{index}.".removeprefix(".")
        for name in (*self.parts.attention, *self.parts.delta_nets):
            if name.startswith(within) and self.reached.get(name) is not layout:
                raise NotExact(f"{name}: the forward ended, but the layout did not reach this layer")

    def _plan(self) -> list[Patch]:
        parts = self.parts
        config = copy.copy(vars(parts.decoder)["config"])
        config._attn_implementation = ATTENTION_NAME
        patches = [Patch(parts.decoder, "config", config)]
        patches.append(Patch(parts.decoder, "forward", partial(_decoder_forward, self, parts.decoder)))
        for entrance in parts.entrances.values():
            patches.append(Patch(entrance, "forward", partial(_entrance_forward, self, entrance)))
            if parts.family.kind(entrance) == parts.family.one_input:
                patches.append(Patch(entrance, "get_placeholder_mask", partial(_placeholder_mask, self, entrance)))
        kinds = heads_kernels.kinds(parts) if self.heads == "fused" else {}
        for name, module in parts.attention.items():
            patches.append(Patch(module, "config", config))
            forward = partial(_attention_forward, kind=kinds[name]) if kinds else type(module).forward
            patches.append(Patch(module, "forward", partial(forward, module, mixer=Mixer(name, self))))
        for name, module in parts.delta_nets.items():
            patches.append(Patch(module, "forward", partial(_delta_net_forward, module, mixer=Mixer(name, self))))
        return patches


def handle_of(decoder: nn.Module) -> Handle:
    """The handle of the patch that is installed on `decoder`."""
    forward = vars(decoder).get("forward")
    if not isinstance(forward, partial) or not isinstance(forward.args[0], Handle):
        raise TypeError(f"{type(decoder).__name__} is not patched")
    return forward.args[0]


@contextmanager
def shared_prefix(model: nn.Module, attention: str = "auto", deltanet: str = "auto") -> Iterator[Handle]:
    """Within this context the model's forward takes `layout=` and computes over that forest of segments, exactly.

    model: a transformers model, or a PEFT model around one. attention: kernels of tree attention, `dense`, `merged`,
    `flex` or `auto`. deltanet: kernels of Gated DeltaNet, `reference`, `fla` or `auto`.

    The forward takes input_ids [1, T] (or inputs_embeds [1, T, hidden]), position_ids [1, T] ([3, 1, T] with images),
    layout with T tokens, use_cache=False, and the model's image arguments. Raises NotExact (a UserError and a
    ValueError), naming layer or argument, for what it cannot make exact. Leaving restores the model to the byte.
    """
    handle = install(model, attention, deltanet)
    try:
        yield handle
    finally:
        handle.remove()


def install(model: nn.Module, attention: str = "auto", deltanet: str = "auto", heads: str = "torch") -> Handle:
    """`shared_prefix` for as long as the model is used. Install before `fully_shard`: the probe runs a forward.

    heads: `torch` or `fused`, see `heads`; NotExact where `fused` does not compute what the model's attention does.
    """
    parts = find_parts(model)
    # Names only: the model may still move to the device where they run.
    attention_kernels.resolve_kernels(attention, torch.device("cuda"))
    deltanet_kernels.resolve_kernels(deltanet, torch.device("cuda"))
    refuse_inexact(model, parts)
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, tree_attention_forward)
    handle = Handle(model, parts, attention, deltanet, heads)
    handle.install()
    return handle


def _entrance_forward(handle: Handle, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A model that holds the decoder: its own forward, for arguments that keep a pack exact."""
    family = handle.parts.family
    given = inputs.check(family, module, args, kwargs)
    if family.kind(module) != family.one_input or not {"input_ids", "inputs_embeds"} <= given.keys():
        return type(module).forward(module, *args, **kwargs)
    handle.ids = given["input_ids"]
    try:
        others = {name: value for name, value in given.items() if name not in ("self", "kwargs", "input_ids")}
        return type(module).forward(module, **others)
    finally:
        handle.ids = None


def _placeholder_mask(handle: Handle, module: Any, input_ids: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """Where images go, by the ids that came beside embeddings: two tokens may have the same embedding."""
    ids = handle.ids if input_ids is None else input_ids
    return type(module).get_placeholder_mask(module, ids, *args, **kwargs)


def _decoder_forward(handle: Handle, module: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """The decoder: its own forward, where afterwards the layout must have reached every mixer."""
    given = inputs.check(handle.parts.family, module, args, kwargs)
    layout: Layout = given["layout"]
    if given.get("use_cache", module.config.use_cache):
        raise NotExact("use_cache: a pack is computed in one piece; pass use_cache=False")
    inputs.refuse_autocast(layout.device)
    handle.reached.clear()
    output = type(module).forward(module, *args, **kwargs)
    if not handle.by_layers:
        handle.check_reached(layout)
    handle.reached.clear()
    return output


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    layout: object = None,
    mixer: Mixer | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention of transformers: query [1, Hq, T, D], key and value [1, Hk, T, D] -> [1, T, Hq, D]."""
    if mixer is None:
        raise NotExact(f"attention implementation {ATTENTION_NAME}: it works under shared_prefix(model) only")
    tree = mixer.admit(layout, query.shape[2])
    if attention_mask is not None or dropout or sliding_window is not None:
        raise NotExact(f"{mixer.name}: a mask, dropout or a sliding window was asked for in attention")
    if mixer.handle.probing:
        return query.transpose(1, 2), None
    given = (query.device, query.dtype, query.shape[3])
    kernels = attention_kernels.resolve_kernels(mixer.handle.attention, *given)
    return attention_kernels.tree_attention(query, key, value, tree, scaling, kernels), None


def _attention_forward(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    cache: object = None,
    *,
    kind: heads_kernels.Kind,
    mixer: Mixer,
    **given: Any,
) -> tuple[Tensor, None]:
    """An attention's own forward, its heads' norms, rotary embedding and gate in kernels of their own."""
    if mixer.handle.probing:
        found: tuple[Tensor, None] = type(module).forward(
            module, hidden_states, position_embeddings, attention_mask, cache, mixer=mixer, **given
        )
        return found
    if cache is not None:
        raise NotExact(f"{mixer.name}: a cache was asked for")
    assert position_embeddings is not None
    heads_kernels.require(hidden_states.device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        how: dict[str, Any] = {"scaling": module.scaling, "mixer": mixer, **given}
        return tree_attention_forward(module, query, key, value, attention_mask, **how)[0]

    return heads_kernels.forward(module, kind, hidden_states, position_embeddings, attend), None


def _delta_net_forward(
    module: Any,
    hidden_states: Tensor,
    cache: object = None,
    attention_mask: object = None,
    *,
    mixer: Mixer,
    layout: object = None,
    **_: Any,
) -> Tensor:
    """Gated DeltaNet over a tree: hidden states [1, T, hidden] through the module's own weights."""
    tree = mixer.admit(layout, hidden_states.shape[1])
    if cache is not None or attention_mask is not None:
        raise NotExact(f"{mixer.name}: a cache or a mask was asked for")
    if mixer.handle.probing:
        return hidden_states
    if tree.width != module.conv_kernel_size:
        raise NotExact(
            f"{mixer.name}: the layout is made for a convolution of width {tree.width}; "
            f"build it with Layout.from_tree(..., width={module.conv_kernel_size})"
        )
    kind = mixer.handle.parts.family.delta_net
    assert kind is not None
    mixed, z, beta, a = kind.project(module, hidden_states)
    given = (mixed.device, mixed.dtype, tree.width)
    kernels = deltanet_kernels.resolve_kernels(mixer.handle.deltanet, *given)
    weight, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
    sizes = (module.key_dim, module.key_dim, module.value_dim)
    parts = deltanet_kernels.tree_conv_parts(mixed.squeeze(0), weight, bias, tree, sizes, kernels=kernels)
    query, key, value = (part[None] for part in parts)
    decay = -_at_least_float32(module.A_log).exp() * F.softplus(_at_least_float32(a) + module.dt_bias)
    parts = deltanet_kernels.tree_delta_rule_parts(
        query.reshape(1, tree.total, -1, module.head_k_dim),
        key.reshape(1, tree.total, -1, module.head_k_dim),
        value.reshape(1, tree.total, -1, module.head_v_dim),
        decay,
        beta,
        tree,
        kernels=kernels,
    )
    normed = fused.gated_norm(getattr(module, kind.norm), parts, z)
    output: Tensor = getattr(module, kind.out)(normed.view(1, tree.total, -1))
    return output


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
