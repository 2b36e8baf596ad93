"""What bitsandbytes makes of tensors on the CPU, in a process of its own: it is installed apart (see Makefile).

Run as a program it reads a safetensors file of tensors and writes another: for each tensor and both kinds of scales,
`<name>/<plain|double>/<part>` with `prefix_train.stream.nf4`'s names of the parts, `.../value`, what it dequantises
them to, and `.../wide`, its other implementation's, which it uses itself for odd widths.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

INSTALLED = Path(sys.prefix) / "oracle"


def quantised(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """bitsandbytes' parts and values of each of `tensors`."""
    if not (INSTALLED / "bitsandbytes").is_dir():
        raise FileNotFoundError(f"bitsandbytes is not in {INSTALLED}: run `make setup`")
    save_file(tensors, folder / "given.safetensors")
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(INSTALLED), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder / "given.safetensors"), str(folder / "made.safetensors")]
    subprocess.run(command, env=environment, check=True, timeout=300, stderr=subprocess.PIPE)
    return load_file(folder / "made.safetensors")


def main(given: str, made: str) -> None:
    import bitsandbytes.functional as library
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    found: dict[str, Tensor] = {}
    for name, tensor in load_file(given).items():
        for kind in ("plain", "double"):
            packed, state = library.quantize_4bit(tensor, quant_type="nf4", compress_statistics=kind == "double")
            parts = {"packed": packed.view(-1), "absmax": state.absmax}
            absmax = state.absmax
            if kind == "double":
                second = {"absmax2": state.state2.absmax, "code2": state.state2.code, "offset": state.offset}
                parts |= second
                absmax = library.dequantize_blockwise(state.absmax, state.state2) + state.offset
            parts["value"] = library.dequantize_4bit(packed, state).reshape(tensor.shape)
            code = library.get_4bit_type("nf4", device="cpu")
            wide = _dequantize_4bit_compute(packed.view(-1), absmax, code, 64, tensor.shape, tensor.dtype)
            parts["wide"] = wide.reshape(tensor.shape)
            found |= {f"{name}/{kind}/{part}": value.clone() for part, value in parts.items()}
    save_file(found, made)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
