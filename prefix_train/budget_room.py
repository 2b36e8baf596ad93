"""How much memory a pack may have: what was said, what this machine has, or what is assumed. No torch."""

from __future__ import annotations

import os

from configs.schema import Config
from configs.wording import counted
from prefix_train import smi
from prefix_train.budget_choices import RESERVE_OF_RANK, Room

ASSUMED = 80 * 10**9
"""Of a GPU that the job will have and this machine has not."""


def find(config: Config, gpu_gb: float | None, host_gb: float | None) -> Room:
    """gpu_gb, host_gb: of a GPU, and what a node may pin, in 10^9 bytes, where that was said."""
    host = None if host_gb is None else int(host_gb * 1e9)
    if gpu_gb is not None:
        return Room(int(gpu_gb * 1e9), host, "GPU", f"a GPU of {gpu_gb:g} GB (--gpu-gb)")
    if not config.slurm.gpus_per_node:
        ranks = 1 if config.cluster == "debug" else config.slurm.tasks_per_node
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        said = f"{there / ranks / 1e9:.4g} GB (this machine's memory for {counted(ranks, 'rank')}; --gpu-gb: a GPU's)"
        return Room(there // ranks, host, "rank", said, RESERVE_OF_RANK)
    if there := smallest_gpu():
        return Room(there, host, "GPU", f"a GPU of {there / 1e9:.4g} GB (this machine's; --gpu-gb: another)")
    return Room(ASSUMED, host, "GPU", f"a GPU of {ASSUMED / 1e9:g} GB (assumed, none is here; --gpu-gb: another)")


def smallest_gpu() -> int:
    """Bytes of the smallest GPU of this machine; 0 where there is none, or where its driver does not answer."""
    return min((int(size) << 20 for size in smi.ask("memory.total") if size.isdecimal()), default=0)
