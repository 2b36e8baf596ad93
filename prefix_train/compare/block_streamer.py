"""BlockStreamer: blocks in the model's dtype from shards on disk, through pinned memory; embedding, norm and head stay.

Put together as its own runner for Qwen3-VL does it (block-streamer 0.2.0, `block_streamer/runners.py`), for a language
model. Its shards hold the store's weights dequantised.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from prefix_train import anatomy
from prefix_train import model as models
from prefix_train.compare.case import IGNORED, Case, draw, factors, labels
from prefix_train.stream.store import Store

AHEAD = 1
"""Blocks that it fetches beforehand: its default, and the least memory with which copies and computing overlap."""


class BlockStreamer:
    """See `case.Rival`."""

    notes = (f"blocks dequantised, prefetch_ahead={AHEAD}", "adapters and optimizer on the CPU", "loss of all logits")

    def __init__(self, case: Case, device: torch.device) -> None:
        package, adapters = import_module("block_streamer"), import_module("block_streamer.lora")
        config, store, example = case.config(), case.store(), case.example()
        skeleton = models.skeleton(config.model, buffers=True)
        found = anatomy.find(skeleton)
        manifest = shards(case, store)
        blocks = nn.ModuleList(found.layers)
        adapter = config.adapter
        lora = package.LoRAConfig(
            rank=adapter.rank, alpha=adapter.alpha, targets=tuple(adapter.targets), top_fraction=1.0
        )  # fmt: skip
        adapters.apply_to_blocks(blocks, lora)
        import_module("block_streamer.runners").materialize_adapters(blocks)
        adapters.freeze_base(blocks)
        self.decoder: Any = package.StreamedModel(
            blocks, device=str(device), prefetch_ahead=AHEAD, manifest=manifest
        ).train()
        for block in store.blocks:
            if not block.name.startswith("block."):
                for name, tensor in store.tensors(block):
                    path, _, attribute = name.rpartition(".")
                    held = nn.Parameter(tensor.to(device), requires_grad=False)
                    skeleton.get_submodule(path)._parameters[attribute] = held
        skeleton.tie_weights()
        self.embedding, self.norm, self.head = skeleton.get_input_embeddings(), found.decoder.norm, found.head
        self.rotary: Any = found.decoder.rotary_emb.to(device)
        self.ids, self.labels = torch.as_tensor(example.ids)[None].to(device), labels(example).to(device)
        self.parameters = factors({f"layers.{name}": one for name, one in blocks.named_parameters()})
        draw(self.parameters)
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-5)

    def update(self) -> None:
        """One update."""
        self.optimizer.zero_grad(set_to_none=True)
        hidden = self.embedding(self.ids)
        positions = torch.arange(self.ids.shape[1], device=self.ids.device)[None]
        rotary = self.rotary(hidden, positions)
        hidden = self.decoder(hidden, position_embeddings=rotary, attention_mask=None, position_ids=positions)
        logits: Tensor = self.head(self.norm(hidden))
        flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
        loss = nn.functional.cross_entropy(flat, self.labels[:, 1:].reshape(-1), ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def read_bytes(self) -> int:
        """As it counts them."""
        return int(self.decoder.stats()["transfer_bytes"])


def shards(case: Case, store: Store) -> Any:
    """Its own format of the store's blocks, dequantised; made now if it is not there."""
    library = import_module("block_streamer.shards")
    folder = case.path("shards")
    if (folder / library.MANIFEST_NAME).is_file():
        return library.ShardManifest.load(folder)

    def states() -> Iterator[tuple[int, dict[str, Tensor]]]:
        for index, block in enumerate(store.layers):
            prefix = f"{block.module}."
            yield index, {name.removeprefix(prefix): tensor for name, tensor in store.tensors(block)}

    return library.convert_modules(states(), folder)
