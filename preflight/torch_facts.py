"""What torch can do on this node, as one JSON line: run as a program, so that a broken driver breaks only this."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch._C._distributed_c10d import HashStore

from preflight.programs import answer_and_end
from preflight.setting import proc

WATCHED = re.compile(r"lib(nccl|nccl-\w+|cuda|cudart|cudnn|nvidia-ml|ibverbs|rdmacm|fabric)([-_.][\w.-]*)?\.so")
"""Libraries whose origin decides how ranks talk to each other and to the device."""


def mapped_libraries(maps: str) -> dict[str, str]:
    """The text of /proc/self/maps -> path of each watched library that is mapped, by file name."""
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/")}
    return {Path(path).name: path for path in sorted(paths) if WATCHED.match(Path(path).name)}


def one_collective(devices: int) -> None:
    """All-reduce one element in a group of one, so that everything that a collective loads is mapped."""
    backend = "nccl" if devices and torch.distributed.is_nccl_available() else "gloo"
    torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    torch.distributed.all_reduce(torch.ones(1, device="cuda:0" if backend == "nccl" else "cpu"))
    torch.distributed.barrier()


def facts() -> dict[str, Any]:
    """Version, backends, devices, threads, mapped libraries."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if torch.distributed.is_gloo_available():
        one_collective(devices)
    libraries = mapped_libraries((proc() / "self/maps").read_text(errors="replace"))
    found = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(index) for index in range(devices)],
        "capability": list(torch.cuda.get_device_capability(0)) if devices else None,
        "peers": peers(devices),
        "cudnn": torch.backends.cudnn.version() if devices else None,  # type: ignore[no-untyped-call]
        "nccl_version": list(torch.cuda.nccl.version()) if devices else None,  # type: ignore[no-untyped-call]
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch._C._has_mkldnn,
        "threads": torch.get_num_threads(),
        "sum": torch.ones(1000, dtype=torch.float64).cumsum(0)[-1].item(),
        "libraries": libraries,
        "bytes": {name: Path(path).stat().st_size for name, path in libraries.items() if Path(path).exists()},
    }
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return found


def peers(devices: int) -> list[str]:
    """Pairs of GPUs (`0-1`) that cannot read each other's memory."""
    pairs = [(a, b) for a in range(devices) for b in range(devices) if a < b]
    return [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]


def main() -> None:
    """Print the facts."""
    print(json.dumps(facts()), flush=True)


if __name__ == "__main__":
    from preflight import torch_facts  # the module by its name, as others that are imported here see it

    answer_and_end(torch_facts.main)
