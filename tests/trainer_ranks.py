"""One rank of transformers' Trainer, or of a loop under Accelerate, on packs: what `tests.lives` starts twice."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from prefix_train import collate_packs, pack_examples, pack_heldout, train_packs
from prefix_train.hf_trainer import PACK_ARGUMENTS, PackCallback
from prefix_train.packs import Packs
from tests import batches, models, oracle, own_loops

COUNT, PACKS, MIN_SHARED = 11, {"max_positions": 45, "epochs": 2}, 4
"""Small packs: with three for each rank, some are empty."""


def built(kind: str) -> tuple[nn.Module, Any]:
    """(model, base) of `all` or `adapter`, in float64, the same in every process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        base = models.build("qwen3_5_text", torch.float64)
    finally:
        torch.set_default_dtype(before)
    if kind == "all":
        return base, base
    lora = LoraConfig(r=2, target_modules=["q_proj", "gate_proj", "in_proj_qkv"])
    adapted = get_peft_model(base, lora, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return adapted, base


def packs_of(base: Any, ranks: int, per_rank: int) -> tuple[Any, Packs]:
    """Examples, and packs of them for so many ranks."""
    examples = batches.make(base, COUNT)
    packs = pack_examples(
        own_loops.rows_of(examples), packs_per_update=ranks * per_rank, ranks=ranks, min_shared=MIN_SHARED, **PACKS
    )
    return examples, packs


def arguments(folder: Path, packs: Packs, **more: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        **PACK_ARGUMENTS,
        "output_dir": str(folder),
        "gradient_accumulation_steps": packs.per_rank,
        "learning_rate": own_loops.LR,
        "lr_scheduler_type": "constant",
        "max_grad_norm": own_loops.CLIP,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **({"ddp_backend": "gloo"} if os.environ.get("WORLD_SIZE", "1") != "1" else {}),
    }
    return TrainingArguments(**{**given, **more})


def trainer(model: nn.Module, folder: Path, packs: Packs, **more: Any) -> Trainer:
    """What docs/guides/transformers-trainer.md shows."""
    heldout = more.pop("heldout", None)
    return Trainer(
        model=model,
        args=arguments(folder, packs, **more),
        train_dataset=packs,
        eval_dataset=heldout,
        data_collator=collate_packs,
        callbacks=[PackCallback()],
    )


def trained_by_trainer(rank: int, folder: Path, kind: str, ranks: int, per_rank: int) -> None:
    """Train, write the parameters and every logged loss."""
    with oracle.float64():
        model, base = built(kind)
        examples, packs = packs_of(base, ranks, per_rank)
        rows = own_loops.rows_of(examples)
        heldout = pack_heldout(rows, max_positions=PACKS["max_positions"], ranks=ranks, min_shared=MIN_SHARED)
        with train_packs(model):
            one = trainer(model, folder / "out", packs, heldout=heldout)
            one.train()
            evaluated = one.evaluate()["eval_loss"]
        logged = [entry["loss"] for entry in one.state.log_history if "loss" in entry]
        leave(folder / f"{rank}.safetensors", model, [*logged, evaluated])


def trained_under_accelerate(rank: int, folder: Path, kind: str, ranks: int, per_rank: int) -> None:
    """The loop that docs/guides/accelerate.md shows."""
    with oracle.float64():
        model, base = built(kind)
        _, packs = packs_of(base, ranks, per_rank)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=packs.per_rank)
        optimizer = own_loops.adamw([each for each in model.parameters() if each.requires_grad])
        losses: list[float] = []
        with train_packs(model):
            loader = DataLoader(packs, batch_size=1, collate_fn=collate_packs)
            wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            found = []
            for pack in loader:
                with accelerator.accumulate(wrapped):
                    loss = wrapped(**pack).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(wrapped.parameters(), own_loops.CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
                found.append(accelerator.reduce(loss.detach(), "mean"))
                if accelerator.sync_gradients:
                    losses.append(float(torch.stack(found).mean()))
                    found = []
        leave(folder / f"{rank}.safetensors", model, losses)
        accelerator.end_training()


def leave(path: Path, model: nn.Module, losses: list[float]) -> None:
    os.makedirs(path.parent, exist_ok=True)
    save_file({**own_loops.trained(model), "losses": torch.tensor(losses, dtype=torch.float64)}, path)
