"""What a check may ask for."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from configs.schema import Config, DataConfig, ModelConfig, PreflightConfig, SlurmConfig

SECTIONS = {"preflight": PreflightConfig, "slurm": SlurmConfig, "data": DataConfig, "model": ModelConfig}
"""Parts of the configuration that checks ask for."""

PROC = "PREFLIGHT_PROC"
"""Environment variable that names another folder than /proc to read this node's facts from."""

SYS = "PREFLIGHT_SYS"
"""The same for /sys."""


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

    def to_text(self) -> str:
        """For a program that goes on with these checks; its own reading of the run folder may be what is wrong."""
        sections = {name: asdict(getattr(self.config, name)) for name in SECTIONS}
        return json.dumps({"run": str(self.run) if self.run else None, "sections": sections})

    @classmethod
    def from_text(cls, text: str) -> Setting:
        """The inverse of `to_text`, without the deadline, which ends the program from outside."""
        told = json.loads(text)
        sections = {name: kind(**told["sections"][name]) for name, kind in SECTIONS.items()}
        return cls(Config(**sections), Path(told["run"]) if told["run"] else None)


def proc() -> Path:
    """/proc, or what stands for it."""
    return Path(os.environ.get(PROC, "/proc"))


def sys_folder() -> Path:
    """/sys, or what stands for it."""
    return Path(os.environ.get(SYS, "/sys"))
