"""What an unknown key may mean: the names that options have in other trainers, or else the option most like it."""

from __future__ import annotations

import difflib

ELSEWHERE = {
    "learning_rate": "train.lr",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "max_steps": "train.updates",
    "steps": "train.updates",
    "warmup_steps": "train.warmup_updates",
    "lr_scheduler_type": "train.schedule",
    "scheduler": "train.schedule",
    "max_grad_norm": "train.clip_norm",
    "gradient_clipping": "train.clip_norm",
    "adam_beta1": "train.beta1",
    "adam_beta2": "train.beta2",
    "adam_epsilon": "train.eps",
    "wd": "train.weight_decay",
    "save_steps": "train.save_every",
    "save_total_limit": "train.keep_checkpoints",
    "eval_steps": "evaluate.every",
    "batch_size": "pack.examples_per_update",
    "global_batch_size": "pack.examples_per_update",
    "train_batch_size": "pack.examples_per_update",
    "per_device_train_batch_size": "pack.packs_per_update",
    "gradient_accumulation_steps": "pack.packs_per_update",
    "max_length": "pack.max_positions",
    "max_seq_length": "pack.max_positions",
    "max_seq_len": "pack.max_positions",
    "sequence_len": "pack.max_positions",
    "gradient_checkpointing": "memory.recompute",
    "activation_checkpointing": "memory.recompute",
    "r": "adapter.rank",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_target_modules": "adapter.targets",
    "target_modules": "adapter.targets",
    "model_name_or_path": "model.path",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype",
    "precision": "model.dtype",
    "attn_implementation": "model.attention",
    "train_file": "data.train",
    "train_data": "data.train",
    "validation_file": "data.heldout",
    "eval_data": "data.heldout",
    "output_dir": "run_root",
    "report_to": "report.trackers",
    "ntasks_per_node": "slurm.tasks_per_node",
    "gres": "slurm.gpus_per_node",
}
"""What options are called in other trainers, and here: names that no likeness of letters leads to the right one."""


def nearest(key: str, known: list[str]) -> str:
    """What is said of `key`, which is none of `known`: which of them is meant."""
    leaf = key.rpartition(".")[2]
    if (meant := ELSEWHERE.get(leaf.replace("-", "_").lower())) in known:
        return f"did you mean {meant}?"

    def likeness(candidate: str) -> float:
        its_leaf = candidate.rpartition(".")[2]
        begins_alike = bool(leaf) and its_leaf.startswith(leaf)
        return difflib.SequenceMatcher(None, key, candidate).ratio() + 0.5 * begins_alike + (its_leaf == leaf)

    best = max(known, key=likeness)
    return f"did you mean {best}?" if likeness(best) > 0.6 else f"the nearest key is {best}"
