"""Which kernels compute a model on a machine: what `auto` means there, and why one asked for by name cannot be had.

Nothing is tried out: each option is a rule over facts of the model and of the machine, so that plan, budget, compiling
ahead and run come to the same. `auto` means the kernels that were measured to be fastest (tests/bench/LOG.md) where
they were measured: on GPUs of MEASURED, with weights that stay there. Elsewhere it means those that came before them.
No torch; `machine` has what needs it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

from configs.errors import UserError
from configs.schema import Config
from prefix_train import smi
from prefix_train.geometry import WHOLE_NORMS, Geometry, read_config

MEASURED = (9, 0)
"""Compute capability of the GPU on which kernels were compared, an H200."""

PACKAGES = {
    "triton": "Triton: pip install triton",
    "fla": "flash-linear-attention: install it as docs/guides/own-cluster.md says",
    "liger_kernel": "Liger: pip install liger-kernel",
}
"""What kernels are imported from, and how it is installed."""

ATTENTION = ("merged", "joined", "flex", "dense")
DELTANET = ("reference", "fla", "fla_segments", "fla_forest", "fla_cuda")
ELEMENTWISE = ("torch", "liger", "fused")
HEADS = ("torch", "fused")

LARGEST_HEAD = 256
"""Most elements of a head, for all kernels but FlexAttention and torch's own."""

LEAST_OF_FLEX = 16
"""Fewest elements of a head that FlexAttention takes on CUDA."""

WIDEST = 4
"""Most rows that an output of `fla_forest`'s convolution reads."""

SHORT = ("bfloat16", "float16")
DTYPES = (*SHORT, "float32")


class Kernels(NamedTuple):
    """One for each option of `model` that names some."""

    attention: str
    deltanet: str
    elementwise: str
    heads: str

    def __str__(self) -> str:
        return ", ".join(f"{option} {kernels}" for option, kernels in self._asdict().items())


@dataclass(frozen=True)
class Machine:
    """Where a model is computed. device: torch's name for its kind. capability: of a GPU; none where that is not known.
    packages: those of PACKAGES that can be imported. assumed: it is not this one."""

    device: str
    capability: tuple[int, int] | None = None
    packages: frozenset[str] = frozenset(PACKAGES)
    assumed: bool = False

    def __str__(self) -> str:
        if not self.gpu:
            return f"a {self.device.upper()}"
        return f"a GPU of compute capability {'.'.join(map(str, self.capability or '?'))}{', assumed' * self.assumed}"

    @property
    def gpu(self) -> bool:
        """Is it a GPU?"""
        return self.device == "cuda"


CPU = Machine("cpu")

ASSUMED = Machine("cuda", MEASURED, assumed=True)
"""Of a job on GPUs, where this machine has none: what docs/guides/own-cluster.md installs is there."""


@dataclass(frozen=True)
class Model:
    """What kernels ask of a model. dtype: as torch names it. head_size: of attention, 0: unknown. width: of the
    convolution of Gated DeltaNet, 0: no layer has one. odd_heads: its attention does something else with heads than
    `heads` computes. odd_sums: its layers are something else than the sums that `residual` computes. tiled: are layers
    recomputed in tiles? streams: do frozen weights pass through the GPU?"""

    dtype: str
    head_size: int = 0
    width: int = 0
    odd_heads: bool = False
    odd_sums: bool = False
    tiled: bool = True
    streams: bool = False

    @classmethod
    def of(cls, config: Config, geometry: Geometry) -> Model:
        """The model that `config` names, as it is trained."""
        memory, recurrent = config.memory, geometry.count("linear_attention")
        return cls(
            dtype=config.model.dtype,
            head_size=int(geometry.text["head_dim"]) if geometry.count("full_attention") else 0,
            width=int(geometry.text["linear_conv_kernel_dim"]) if recurrent else 0,
            odd_heads=geometry.model_type in WHOLE_NORMS,
            odd_sums=geometry.model_type in WHOLE_NORMS,
            tiled=memory.recompute and memory.tile_rows > 0,
            streams=config.engine == "stream",
        )


def choose(config: Config, machine: Machine, geometry: Geometry | None = None) -> Kernels:
    """The kernels of `config` on `machine`. geometry: of its model, where it has been read already.

    UserError, naming why, for one that is asked for by name and cannot run.
    """
    asked = config.model
    model = Model(asked.dtype)
    if machine.gpu:
        model = Model.of(config, geometry or Geometry.of(read_config(asked)))
    return Kernels(
        attention(asked.attention, model, machine),
        deltanet(asked.deltanet, model, machine),
        elementwise(asked.elementwise, model, machine),
        heads(asked.heads, model, machine),
    )


def settle(config: Config, machine: Machine, geometry: Geometry | None = None) -> Config:
    """`config` with the kernels of `choose` in the place of `auto`."""
    return replace(config, model=replace(config.model, **choose(config, machine, geometry)._asdict()))


def attention(asked: str, model: Model, machine: Machine) -> str:
    """Kernels of tree attention.

    `auto`: on a GPU `joined`, where that was measured, else `merged`; where the pieces that both are made of are not to
    be had (wider dtypes, odd heads) `flex`, and `dense` for heads that are too small for that. Elsewhere `merged`.
    """
    if asked == "auto":
        if not machine.gpu:
            return "merged"
        if _no_pieces(model) is not None:
            return "flex" if not model.head_size or model.head_size >= LEAST_OF_FLEX else "dense"
        return "joined" if _measured(model, machine) and "triton" in machine.packages else "merged"
    _known("attention", asked, ATTENTION)
    if asked in ("flex", "joined") and not machine.gpu:
        raise UserError(f"attention kernels {asked!r} run on CUDA, not on {machine.device}: set model.attention=merged")
    if asked == "joined":
        _require("attention kernels 'joined' need", "triton", machine, "model.attention=merged")
    if asked in ("merged", "joined") and machine.gpu and (why := _no_pieces(model)):
        raise UserError(
            f"attention kernels {asked!r} on CUDA take bfloat16 with heads of 8, 16, ... {LARGEST_HEAD}, not {why}: "
            "set model.attention=flex or model.attention=dense"
        )
    return asked


def deltanet(asked: str, model: Model, machine: Machine) -> str:
    """Kernels of Gated DeltaNet. `auto`: on a GPU `fla_forest`, where that was measured and takes the convolution's
    width, else `fla`; elsewhere `reference`."""
    if asked == "auto":
        if not machine.gpu:
            return "reference"
        takes = _no_forest(model) is None and {"triton", "fla"} <= machine.packages
        return "fla_forest" if takes and _measured(model, machine) else "fla"
    _known("deltanet", asked, DELTANET)
    if asked == "reference":
        return asked
    if not machine.gpu:
        raise UserError(
            f"deltanet kernels {asked!r} run on CUDA, not on {machine.device}: set model.deltanet=reference"
        )
    if asked == "fla_forest":
        _require("deltanet kernels 'fla_forest' need", "triton", machine, "model.deltanet=reference")
        if why := _no_forest(model):
            raise UserError(
                f"deltanet kernels 'fla_forest' take {', '.join(DTYPES)} and a convolution of a width up to {WIDEST}, "
                f"not {why}: set model.deltanet=fla"
            )
    if model.width:
        _require(f"deltanet kernels {asked!r} need", "fla", machine, "model.deltanet=reference")
    return asked


def elementwise(asked: str, model: Model, machine: Machine) -> str:
    """Kernels of norms and gated activations.

    `auto`: on a GPU with Liger `fused`, where that was measured and the model's layers are sums that it computes, else
    `liger`; without Liger, elsewhere, and where layers are not recomputed in tiles, `torch`.
    """
    if asked == "auto":
        if not machine.gpu or not model.tiled or "liger_kernel" not in machine.packages:
            return "torch"
        takes = not model.odd_sums and "triton" in machine.packages
        return "fused" if takes and _measured(model, machine) else "liger"
    _known("elementwise", asked, ELEMENTWISE)
    if asked == "torch":
        return asked
    what = f"model.elementwise={asked}"
    if not machine.gpu:
        raise UserError(f"{what} runs on CUDA, not on {machine.device}: set it to auto")
    _require(f"{what} needs", "liger_kernel", machine, "model.elementwise=auto")
    if asked == "fused":
        _require(f"{what} needs", "triton", machine, "model.elementwise=auto")
    if asked == "fused" and model.odd_sums:
        raise UserError(f"{what} does not compute layers with norms behind their mixer: set model.elementwise=auto")
    return asked


def heads(asked: str, model: Model, machine: Machine) -> str:
    """Kernels around attention's heads. `auto`: `fused` on a GPU, where that was measured and takes the model's
    attention; else `torch`."""
    if asked == "auto":
        takes = _no_fused_heads(model) is None and "triton" in machine.packages
        return "fused" if takes and _measured(model, machine) else "torch"
    _known("heads", asked, HEADS)
    if asked == "torch":
        return asked
    if not machine.gpu:
        raise UserError(f"model.heads=fused runs on CUDA, not on {machine.device}: set model.heads=torch")
    _require("model.heads=fused needs", "triton", machine, "model.heads=torch")
    if why := _no_fused_heads(model):
        raise UserError(f"model.heads=fused does not take {why}: set model.heads=torch")
    return asked


def expected(config: Config) -> Machine:
    """What the job of `config` will run on: for who plans it. This machine's kind of GPU, where it has one; else
    ASSUMED."""
    if not config.slurm.gpus_per_node:
        return CPU
    return here() if here().gpu else ASSUMED


def importable() -> frozenset[str]:
    """Those of PACKAGES that are installed here."""
    return frozenset(name for name in PACKAGES if find_spec(name) is not None)


@cache
def here() -> Machine:
    """This machine: its GPU of the smallest capability; CPU where there is none, or its driver does not say."""
    found = [tuple(map(int, one.split("."))) for one in smi.ask("compute_cap") if re.fullmatch(r"\d+\.\d+", one)]
    return Machine("cuda", min(found), importable()) if found else CPU  # type: ignore[arg-type]


def _measured(model: Model, machine: Machine) -> bool:
    return machine.gpu and machine.capability == MEASURED and not model.streams


def _no_pieces(model: Model) -> str | None:
    """Why vendors' kernels on CUDA do not take this model's attention."""
    if model.dtype in SHORT and not model.head_size % 8 and model.head_size <= LARGEST_HEAD:
        return None
    return f"{model.dtype} with heads of {model.head_size}"


def _no_forest(model: Model) -> str | None:
    return None if model.dtype in DTYPES and model.width <= WIDEST else f"{model.dtype} and {model.width}"


def _no_fused_heads(model: Model) -> str | None:
    if model.dtype not in DTYPES:
        return f"{model.dtype}, only {', '.join(DTYPES)}"
    if model.head_size > LARGEST_HEAD:
        return f"heads of {model.head_size}, only of up to {LARGEST_HEAD}"
    return "attention that normalises all heads together" if model.odd_heads else None


def _known(option: str, asked: str, names: tuple[str, ...]) -> None:
    if asked not in names:
        raise UserError(f"{option} kernels {asked!r} are unknown: write auto, {', '.join(names)}")


def _require(what: str, package: str, machine: Machine, instead: str) -> None:
    if package not in machine.packages:
        raise UserError(f"{what} {PACKAGES[package]}, or set {instead}")
