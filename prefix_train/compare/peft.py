"""PEFT on bitsandbytes' 4-bit modules, all on the device, with transformers' own recomputation: QLoRA as it is known.

The modules are given the store's own bytes, so that every program computes with the same weights.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from prefix_train import model as models
from prefix_train.adapters import old_name_in_peft
from prefix_train.compare.case import Case, draw, factors, labels
from prefix_train.stream.manifest import Stored
from prefix_train.stream.nf4 import BLOCK, BLOCK2
from prefix_train.stream.store import Store, parts_of


class Peft:
    """See `case.Rival`."""

    notes = ("all weights stay", "recomputation by transformers, loss of all logits")

    def __init__(self, case: Case, device: torch.device) -> None:
        from peft import LoraConfig, get_peft_model

        config, store, example = case.config(), case.store(), case.example()
        base: Any = models.skeleton(config.model, buffers=True)
        fill(base, store, device)
        base.is_loaded_in_4bit = True  # which makes PEFT choose its module for these
        adapter = config.adapter
        lora = LoraConfig(
            r=adapter.rank, lora_alpha=adapter.alpha, lora_dropout=0.0, target_modules=list(adapter.targets)
        )
        with old_name_in_peft():
            self.model: Any = get_peft_model(base, lora)
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
        base.config.use_cache = False
        self.model.to(device).train()
        self.ids, self.labels = torch.as_tensor(example.ids)[None].to(device), labels(example).to(device)
        self.parameters = factors(dict(self.model.named_parameters()))
        draw(self.parameters)
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-5)

    def update(self) -> None:
        """One update."""
        self.optimizer.zero_grad(set_to_none=True)
        self.model(input_ids=self.ids, labels=self.labels).loss.backward()
        self.optimizer.step()

    def read_bytes(self) -> int:
        """Nothing passes."""
        return 0


def fill(base: nn.Module, store: Store, device: torch.device) -> None:
    """Give a model on the meta device all its weights, on `device`; quantised ones in bitsandbytes' modules."""
    for block in store.blocks:
        buffer = store.bytes(block)
        for stored in block.tensors:
            path, _, attribute = f"{block.module}.{stored.name}".rpartition(".")
            parts = {name: part.to(device, copy=True) for name, part in parts_of(stored, buffer).items()}
            if stored.weights == "plain":
                owner = base.get_submodule(path)
                owner._parameters[attribute] = nn.Parameter(parts["data"], requires_grad=False)
            else:
                parent, _, child = path.rpartition(".")
                made = quantised(base.get_submodule(path), stored, parts)
                setattr(base.get_submodule(parent), child, made)
    base.tie_weights()  # type: ignore[operator]


def quantised(linear: Any, stored: Stored, parts: dict[str, torch.Tensor]) -> nn.Module:
    """bitsandbytes' module for `linear`, which has its weight as these parts."""
    library, modules = import_module("bitsandbytes.functional"), import_module("bitsandbytes.nn")
    device, second = parts["packed"].device, None
    if "absmax2" in parts:
        second = library.QuantState(
            absmax=parts["absmax2"], code=parts["code2"], blocksize=BLOCK2, dtype=torch.float32
        )  # fmt: skip
    state = library.QuantState(
        absmax=parts["absmax"],
        shape=torch.Size(stored.shape),
        code=library.get_4bit_type("nf4", device=device),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=stored.dtype,
        offset=parts.get("offset"),
        state2=second,
    )
    made: nn.Module = modules.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=stored.dtype, quant_type="nf4", device="meta"
    )
    made.weight = modules.Params4bit(
        parts["packed"].view(-1, 1),
        requires_grad=False,
        quant_state=state,
        quant_type="nf4",
        bnb_quantized=True,
        module=made,
    )
    made.quant_state = state
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias, requires_grad=False)
    return made
