"""What torch can do on this node, as one JSON line: run as a program, so that a broken driver breaks only this."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed


def facts() -> dict[str, Any]:
    """Version, backends, devices, threads."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(index) for index in range(devices)],
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch._C._has_mkldnn,
        "threads": torch.get_num_threads(),
        "sum": torch.ones(1000, dtype=torch.float64).cumsum(0)[-1].item(),
    }


if __name__ == "__main__":
    print(json.dumps(facts()), flush=True)
