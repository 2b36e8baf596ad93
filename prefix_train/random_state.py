"""Random state of a process: Python's, NumPy's, torch's and its CUDA device's generators, as JSON can hold it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture() -> dict[str, Any]:
    """The state of all generators that this process draws from."""
    version, words, gauss = random.getstate()
    generator: dict[str, Any] = np.random.get_state(legacy=False)
    return {
        "python": [version, list(words), gauss],
        "numpy": {**generator, "state": {**generator["state"], "key": generator["state"]["key"].tolist()}},
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def restore(state: dict[str, Any]) -> None:
    """Set the generators as `capture` found them; a CUDA state where there is no CUDA device any more is left."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    generator = state["numpy"]
    key = np.array(generator["state"]["key"], dtype=np.uint32)
    np.random.set_state({**generator, "state": {**generator["state"], "key": key}})
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _text(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
