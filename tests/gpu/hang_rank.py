"""One of two ranks under FSDP2 over NCCL; the last one leaves before the fourth update's forward."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from prefix_train import heartbeat
from prefix_train.recorder import Recorder
from slurm import rank as slurm_rank

SIZE, UPDATES = 4096, 40


def main(run: Path, rank: int) -> None:
    """Train, then leave or wait for the one that left."""
    slurm_rank.allow_watching(run, rank)
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{run}/meet", rank=rank, world_size=2, device_id=device)
    beat = heartbeat.Heartbeat(run, rank, 2)
    with Recorder(run, rank, lambda: beat.standing):
        model = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(4))).to(device)
        mesh = init_device_mesh("cuda", (2,))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        data = torch.ones(SIZE, SIZE, device=device)
        for update in range(1, UPDATES + 1):
            beat.phase("forward", update, 0)
            out = model(data).sum()
            beat.phase("backward", update, 0)
            out.backward()
            torch.cuda.synchronize()
        beat.phase("forward", UPDATES + 1, 0)
        if rank == 1:
            leave(run)
        model(data)
        torch.cuda.synchronize()


def leave(run: Path) -> None:
    """Never come to the collective that the other rank waits in."""
    (run / "left").touch()
    time.sleep(300)


if __name__ == "__main__":
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    main(Path(sys.argv[1]), int(sys.argv[2]))
