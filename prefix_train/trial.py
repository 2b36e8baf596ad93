"""What runs every kernel of a job without its data: the kernels of one Gated DeltaNet layer, those around attention's
heads, and one update of a model that has one layer of each kind."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from configs.schema import Config
from prefix_train import anatomy, gradients, heads, machine
from prefix_train import model as models
from prefix_train.bench import random_examples, star
from prefix_train.collate import collate, entry_weights
from prefix_train.deltanet import tree_conv_parts, tree_delta_rule
from prefix_train.dist import Ranks
from prefix_train.families import find_parts
from prefix_train.geometry import Geometry
from prefix_train.groups import CHUNK
from prefix_train.layout import Layout
from prefix_train.step import Stepper, update

SHARE = 2 * CHUNK
"""Tokens of each of the two continuations."""

LEAST = 2 * SHARE + CHUNK
"""Fewest tokens of a trial."""


def delta_net(config: Config, geometry: Geometry, tokens: int, device: torch.device) -> None:
    """Forward and backward of one Gated DeltaNet layer's kernels over a prefix and two continuations.

    Launches only: the device may still be at work when it returns.
    """
    sizes = geometry.text
    heads, value_heads = int(sizes["linear_num_key_heads"]), int(sizes["linear_num_value_heads"])
    width, value_width = int(sizes["linear_key_head_dim"]), int(sizes["linear_value_head_dim"])
    tree = [tokens - 2 * SHARE, SHARE, SHARE], [-1, 0, 0]
    layout = Layout.from_tree(*tree, width=int(sizes["linear_conv_kernel_dim"])).to(device)
    dtype = models.DTYPES[config.model.dtype]
    of_parts = geometry.linear_key_width, geometry.linear_key_width, geometry.linear_value_width
    weight = torch.randn(sum(of_parts), layout.width, dtype=dtype, device=device) / layout.width
    weight.requires_grad_(config.train.trainable == "all")
    mixed = torch.randn(tokens, sum(of_parts), dtype=dtype, device=device, requires_grad=True)
    kernels = machine.chosen(config, device, geometry).deltanet
    parts = tree_conv_parts(mixed, weight, None, layout, of_parts, kernels=kernels)
    query, key = (part.reshape(1, tokens, heads, width) for part in parts[:2])
    value = parts[2].reshape(1, tokens, value_heads, value_width)
    decay = torch.full((1, tokens, value_heads), -0.05, device=device, requires_grad=True)
    beta = torch.full((1, tokens, value_heads), 0.5, dtype=dtype, device=device, requires_grad=True)
    out = tree_delta_rule(query, key, value, decay, beta, layout, kernels=kernels)
    out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]


def heads_of_attention(config: Config, device: torch.device) -> None:
    """Forward and backward of the kernels around attention's heads, for queries and for keys of one layer.

    Launches only. Nothing where the model has no attention; NotExact where these kernels do not compute it.
    """
    parts = find_parts(distinct_layers(config, torch.device("meta")))
    if not parts.attention:
        return
    (name, module), *_ = parts.attention.items()
    kind, dtype = heads.kinds(parts)[name], models.DTYPES[config.model.dtype]
    rotary = 2 * len(parts.decoder.rotary_emb.inv_freq)
    cos, sin = torch.ones(2, LEAST, rotary, dtype=dtype, device=device)
    for projection, norm, with_gate in ((module.q_proj, "q_norm", kind.gated), (module.k_proj, "k_norm", False)):
        width = module.head_dim * (1 + with_gate)
        x = torch.randn(LEAST, projection.out_features // width, width, dtype=dtype, device=device, requires_grad=True)
        how = heads.Norm.of(getattr(module, norm)) if kind.normed else None
        if how is not None:
            weight = torch.ones(module.head_dim, dtype=dtype, device=device)
            how = how._replace(weight=weight.requires_grad_(config.train.trainable == "all"))
        out, gate = heads.rotated(x * 1, how, cos, sin, with_gate)
        out = out.flatten(1) if gate is None else heads.gated(out, gate)
        out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]


def whole_update(config: Config, tokens: int, device: torch.device) -> None:
    """One update of `distinct_layers` at the job's options: forward, recomputation, backward, clip, optimizer.

    tokens: of the pack, a prefix and two continuations, at least LEAST.
    """
    dtype = models.DTYPES[config.model.dtype]
    model = models.prepare(distinct_layers(config, device), config)
    root = models.Root(model, dtype, config.train.loss_chunk_rows, images=True).to(device)
    vocabulary = anatomy.find(model).head.out_features
    examples = random_examples(tokens - 2 * SHARE, 2, SHARE, vocabulary, config.seed)
    weights = entry_weights("example", [int(example.target.sum()) for example in examples])
    batch = collate(star(examples, tokens - 2 * SHARE), examples, weights)
    parameters = anatomy.trainable(model)
    # One blank image and few tokens reach not every tensor: nothing is due.
    coverage = gradients.Coverage(list(parameters), frozenset(parameters), config.train.warmup_updates)
    optimizer = torch.optim.AdamW(parameters.values())
    ranks = Ranks(0, 1, device, None)
    stepper = Stepper(root, parameters, optimizer, ranks, coverage, config.seed, config.train.clip_norm)
    update(stepper, 1, 0.0, [batch])


def distinct_layers(config: Config, device: torch.device) -> PreTrainedModel:
    """The job's model with one decoder layer of each kind and one of its vision tower, random weights, on `device`."""
    own = models.own_config(config.model)
    text = own.get_text_config()
    text.num_hidden_layers = 1
    if types := getattr(text, "layer_types", None):
        text.layer_types = list(dict.fromkeys(types))
        text.num_hidden_layers = len(text.layer_types)
    auto: Any = AutoModelForCausalLM
    if own.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        auto = AutoModelForImageTextToText
        own.vision_config.depth = 1
        if hasattr(own.vision_config, "deepstack_visual_indexes"):
            own.vision_config.deepstack_visual_indexes = [0]
    with torch.device(device), torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = auto.from_config(own, dtype=models.DTYPES[config.model.dtype])
    return model.eval()
