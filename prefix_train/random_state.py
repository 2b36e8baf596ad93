"""Random state of a process (Python, NumPy, torch, its CUDA device) as tensors, gathered from all ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from prefix_train.tensors import rank, world


def capture() -> dict[str, Tensor]:
    """The state of all generators that this process draws from."""
    _, words, gauss = random.getstate()
    generator: dict[str, Any] = np.random.get_state(legacy=False)
    inner = generator["state"]
    state = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*inner["key"].tolist(), inner["pos"], generator["has_gauss"]]),
        "numpy_gauss": torch.tensor([generator["gauss"]], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: Mapping[str, Tensor]) -> None:
    """Set the generators as `capture` found them; a CUDA state where there is no CUDA device any more is left."""
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, state["numpy_gauss"].item()))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def gather(device: torch.device) -> dict[str, Tensor]:
    """Every rank's state as `rank<k>.<name>`, on rank 0; nothing on other ranks. Every rank calls it.

    `device`: where the process group's tensors are.
    """
    if world() == 1:
        return {f"rank0.{name}": tensor for name, tensor in capture().items()}
    mine = torch.frombuffer(bytearray(save(capture())), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world())]
    dist.all_gather(sizes, torch.tensor([mine.numel()], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    blobs = [torch.zeros_like(padded) for _ in range(world())]
    dist.all_gather(blobs, padded)
    if rank() != 0:
        return {}
    gathered = {}
    for k, (blob, size) in enumerate(zip(blobs, sizes, strict=True)):
        state = load(blob[: int(size)].cpu().numpy().tobytes())
        gathered.update({f"rank{k}.{name}": tensor for name, tensor in state.items()})
    return gathered
