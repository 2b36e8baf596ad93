"""Small stores, and the damage that tests do to them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from prefix_train.stream import build
from prefix_train.stream.places import Choice
from prefix_train.stream.store import Store
from tests import models

BF16 = Choice("plain", torch.bfloat16)
NF4 = Choice("nf4", torch.bfloat16)
NF4_TWICE = Choice("nf4", torch.bfloat16, double_quant=True)


def store(folder: Path, choice: Choice = NF4, family: str = "qwen3", seed: int = 0) -> Store:
    """The store of a tiny model with seeded weights."""
    return build.from_model(models.build(family, torch.bfloat16, seed), folder, choice)


def contents(folder: Path) -> dict[str, str]:
    """Hash of every file below `folder` by its name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def change(path: Path, offset: int, flip: int = 1) -> None:
    """Flip bits of one byte of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= flip
    path.write_bytes(data)


def cut(path: Path, size: int) -> None:
    """Make a file `size` bytes long."""
    with path.open("r+b") as file:
        file.truncate(size)
