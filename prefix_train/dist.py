"""The ranks of a run: who they are, what they agree on, what they add up. With one rank nothing is communicated.

Ranks exchange tensors and JSON text, never pickles.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.errors import UserError

T = TypeVar("T")


class Disagreement(RuntimeError):
    """Ranks that must hold the same do not: what, and which rank holds what."""


@dataclass(frozen=True)
class Ranks:
    """This rank's place. mesh: all ranks, one dimension; none where this is the only one."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh | None

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values` over the ranks, on every rank, in place."""
        if self.mesh is not None:
            torch_dist.all_reduce(values)
        return values

    def max(self, value: int) -> int:
        """Largest `value` of any rank, on every rank."""
        largest = torch.tensor([value], device=self.device)
        if self.mesh is not None:
            torch_dist.all_reduce(largest, torch_dist.ReduceOp.MAX)
        return int(largest.item())

    def any(self, flag: bool) -> bool:
        """Is `flag` set on any rank? All ranks get the same answer."""
        return bool(self.max(int(flag)))

    def together(self, work: Callable[[], T]) -> T:
        """`work()`, whose UserError on any rank is one on every rank: nobody goes on to wait for a rank that stopped.

        Every rank calls it. Anything else that `work` raises ends this rank at once.
        """
        try:
            done, mistake = work(), None
        except UserError as error:
            done, mistake = None, error
        if not self.any(mistake is not None):
            return done  # type: ignore[return-value]
        texts = self.gather(str(mistake) if mistake else None)
        if mistake:
            raise mistake
        raise UserError(next(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, by rank; anything that JSON can hold."""
        if self.mesh is None:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world)]
        torch_dist.all_gather(lengths, torch.tensor([len(text)], device=self.device))
        longest = int(torch.cat(lengths).max())
        padded = torch.nn.functional.pad(text, (0, longest - len(text)))
        parts = [torch.empty_like(padded) for _ in range(self.world)]
        torch_dist.all_gather(parts, padded)
        return [
            json.loads(part[: int(length)].cpu().numpy().tobytes()) for part, length in zip(parts, lengths, strict=True)
        ]

    def require_same(self, what: str, value: str, letters: int = 16) -> None:
        """Raise Disagreement on every rank unless all hold the same `value`; so many letters of it tell a reader."""
        held = self.gather(value)
        if len(set(held)) > 1:
            lines = ", ".join(f"rank {rank}: {one[:letters]}" for rank, one in enumerate(held))
            raise Disagreement(f"ranks disagree on {what}: {lines}")

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.any(False)


@contextmanager
def joined(timeout_s: float) -> Iterator[Ranks]:
    """The process group of the environment's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Without them this is the only rank. NCCL where CUDA is, gloo else. The group is torn down however the block ends: a
    rank that failed aborts what is in flight, so that it ends with its own error instead of waiting for the others.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = _device(local)
    if world == 1:
        yield Ranks(0, 1, device, None)
        return
    torch_dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield Ranks(rank, world, device, init_device_mesh(device.type, (world,)))
    finally:
        torch_dist.destroy_process_group()


def _device(local: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local} has no GPU: this node shows {torch.cuda.device_count()}; "
            "set slurm.tasks_per_node to the number of GPUs"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
