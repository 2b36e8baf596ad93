"""What a check may ask for."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from configs.schema import Config

PROC = "PREFLIGHT_PROC"
"""Environment variable that names another folder than /proc to read this node's facts from."""


@dataclass(frozen=True)
class Setting:
    """One node's checks: the run's options and what is left of their time.

    run: the run folder, None where a machine is checked by itself. deadline: of `time.monotonic`.
    """

    config: Config = field(default_factory=Config)
    run: Path | None = None
    deadline: float = float("inf")

    @property
    def left_s(self) -> float:
        """Seconds until the node's deadline, at least a tenth."""
        return max(0.1, self.deadline - time.monotonic())

    @property
    def folder(self) -> Path:
        """The folder whose file system the run will write to."""
        return self.run or Path.cwd()

    @property
    def wants_gpus(self) -> int | None:
        """GPUs that the node must have; None where nothing was asked for."""
        return None if self.run is None else self.config.slurm.gpus_per_node


def proc() -> Path:
    """/proc, or what stands for it."""
    return Path(os.environ.get(PROC, "/proc"))
