"""What the forward of a patched model may be given, so that a pack is computed as its examples alone.

Everything else is refused by name.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from prefix_train.families import ROUTER_LOSS, Family, NotExact
from prefix_train.layout import Layout

UNDERSTOOD = {
    "deepstack_visual_embeds",
    "image_grid_thw",
    "input_ids",
    "inputs_embeds",
    "layout",
    "logits_to_keep",
    "mm_encoder_outputs",
    "mm_token_type_ids",
    "output_hidden_states",
    "pixel_values",
    "position_ids",
    "return_dict",
    "use_cache",
    "visual_pos_masks",
}
"""Arguments of a forward that keep a pack exact; any other is refused unless it is None or False."""

REASONS = {
    "attention_mask": "a pack has no padding, and what sees what follows from the layout",
    "cache": "a pack is computed in one piece",
    "past_key_values": "a pack is computed in one piece",
    "labels": "they would be shifted over the segments' boundaries; compute the loss from the hidden states",
    "output_router_logits": ROUTER_LOSS,
    "output_attentions": "tree attention does not form the probabilities",
    "is_causal": "what sees what follows from the layout",
}
"""Why an argument is refused, where the name alone does not say it."""


def check(family: Family, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a forward was given, by name and without what is None; NotExact for what would make a pack inexact."""
    bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    given = {name: value for name, value in {**bound, **bound.get("kwargs", {})}.items() if value is not None}
    for name in given.keys() - UNDERSTOOD - {"self", "kwargs"}:
        if given[name] is not False or name == "is_causal":
            raise NotExact(f"{name}: {REASONS.get(name, 'not an argument that is exact over a tree')}")
    layout = given.get("layout")
    if not isinstance(layout, Layout):
        raise NotExact("layout: the model is under shared_prefix; pass the pack's Layout as the keyword `layout`")
    tokens = given.get("inputs_embeds", given.get("input_ids"))
    if tokens is None:
        raise NotExact("input_ids: the forward got neither input_ids nor inputs_embeds")
    if tokens.shape[0] != 1:
        raise NotExact(f"a batch of {tokens.shape[0]}: a pack is one buffer; put the examples into one layout")
    if tokens.shape[1] != layout.total:
        raise NotExact(f"layout: it has {layout.total} tokens, the input {tokens.shape[1]}")
    if tokens.device != layout.device:
        raise NotExact(f"layout: it is on {layout.device}, the input on {tokens.device}; use layout.to(device)")
    _check_positions(family, given, layout.total)
    return given


def _check_positions(family: Family, given: dict[str, Any], total: int) -> None:
    if "position_ids" not in given:
        raise NotExact("position_ids: a pack needs its examples' own; for text pass layout.position_ids()")
    shape, has_images = tuple(given["position_ids"].shape), "pixel_values" in given or "mm_encoder_outputs" in given
    wanted = [(3, 1, total)] if has_images else [(1, total), (3, 1, total)][: 1 + family.three_dimensional]
    if shape not in wanted:
        raise NotExact(f"position_ids: their shape is {shape}, not {' or '.join(map(str, wanted))}")


def refuse_autocast(device: torch.device) -> None:
    """Autocast takes the recurrence's float32 state to bfloat16, and in recomputation may find other dtypes."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        raise NotExact("autocast is on: it computes recurrent states in its own dtype; leave it and cast the weights")
