"""A whole vision-language model on CUDA: packs through the kernels that train, against transformers' own model there,
both held against float64 on the CPU."""

from __future__ import annotations

import copy
import inspect
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5

from configs import kernel_pins
from configs.schema import AdapterConfig, Config, MemoryConfig, ModelConfig, PackConfig, TrainConfig
from prefix_train import anatomy, gradients, kernels, model, step, tiny, unit, verify
from prefix_train.collate import Batch, collate, entry_weights
from prefix_train.dist import Ranks
from prefix_train.packing import Pack
from prefix_train.plan import plan_evaluation
from prefix_train.render import Example
from prefix_train.tree import build_forest
from prefix_train.verify import Half
from tests import conversations, models, oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

FAMILY = "qwen3_5 for CUDA"
MIN_SHARED = 4
DRAWS = 8


@pytest.fixture(autouse=True, scope="module")
def as_in_a_run() -> Iterator[None]:
    """Kernels pinned where that is still possible (transformers imports fla if it can); float32 in float32."""
    if "fla" not in sys.modules or os.environ.get("FLA_CACHE_MODE") == "default":
        print(kernels.use_pins())
    allowed, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = allowed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@cache
def base(dtype: torch.dtype, draw: int = 0) -> tuple[PreTrainedModel, Any]:
    """On the CPU. draw: of the weights."""
    built = tiny.build_model(conversations.BUILDS[FAMILY], 0)
    with torch.random.fork_rng():
        torch.manual_seed(draw)
        models.draw(built)
    return built.to(dtype).train(), tiny.build_processor(built.config)


@cache
def examples(folder: Path, images: conversations.Images) -> list[Example]:
    built, processor = base(torch.float32)
    return conversations.product(conversations.rows(images, folder), folder, built, processor)


@cache
def truth(folder: Path, dtype: torch.dtype, draw: int = 0) -> Half:
    """The examples alone in float64, with the weights that `dtype` can hold."""
    wide = copy.deepcopy(base(dtype, draw)[0]).double()
    with oracle.float64(), plain_torch():
        return verify.standalone(wide, examples(folder, "both"))


@contextmanager
def plain_torch() -> Iterator[None]:
    """transformers' own functions, for which it takes fla's where that is installed, on the CPU too."""
    names = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(modeling_qwen3_5, name, inspect.unwrap(getattr(modeling_qwen3_5, name)))
        yield


def standalone(folder: Path, dtype: torch.dtype, draw: int = 0) -> Half:
    """The examples alone on CUDA through transformers' model; gradients are added in float64."""
    built, found = copy.deepcopy(base(dtype, draw)[0]).cuda(), examples(folder, "both")
    halves = [verify.standalone(built, [example]) for example in found]
    sums = {name: sum(half.gradients[name] for half in halves) / len(found) for name in halves[0].gradients}
    return Half({index: half.losses[0] for index, half in enumerate(halves)}, sums)  # type: ignore[arg-type]


def packs_of(found: Sequence[Example], most: int) -> tuple[Pack, ...]:
    forest = build_forest([example.keys for example in found], MIN_SHARED)
    pack = PackConfig(max_positions=most, min_shared=MIN_SHARED)
    return plan_evaluation(forest.lengths, forest, pack, 1).updates[0][0]


def root_of(
    dtype: torch.dtype,
    attention: str,
    deltanet: str,
    images: bool,
    *,
    draw: int = 0,
    recompute: bool = True,
    **adapter: Any,
) -> model.Root:
    """A fresh model on CUDA, ready to be trained: adapters and merger where `adapter` is given, else all of it."""
    config = Config(
        model=ModelConfig(
            dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
            attention=attention,  # type: ignore[arg-type]
            deltanet=deltanet,  # type: ignore[arg-type]
            elementwise="liger" if recompute else "torch",
            heads="torch",
        ),
        train=TrainConfig(trainable="adapter" if adapter else "all"),
        adapter=AdapterConfig(**adapter),
        memory=MemoryConfig(recompute=recompute),
    )
    prepared = model.prepare(copy.deepcopy(base(dtype, draw)[0]).cuda(), config)
    return model.Root(prepared, dtype, chunk_rows=64, images=images).cuda()


def packed(folder: Path, dtype: torch.dtype, attention: str, deltanet: str, most: int = 4096, draw: int = 0) -> Half:
    found = examples(folder, "both")
    return verify.packed(root_of(dtype, attention, deltanet, images=True, draw=draw), packs_of(found, most), found)


def whole_error(half: Half, wanted: Half) -> float:
    """Of all gradients together, relative."""
    error = torch.stack([(half.gradients[name] - each).norm() for name, each in wanted.gradients.items()]).norm()
    return float(error / torch.stack([each.norm() for each in wanted.gradients.values()]).norm())


def worst_error(half: Half, wanted: Half) -> tuple[float, str]:
    """Of one gradient tensor, relative; one below 1e-6 of all gradients' norm is held against that."""
    norms = {name: each.norm() for name, each in wanted.gradients.items()}
    floor = 1e-6 * torch.stack(list(norms.values())).norm()
    return max(
        (float((half.gradients[name] - each).norm() / max(norms[name], floor)), name)
        for name, each in wanted.gradients.items()
    )


def loss_error(half: Half, wanted: Half) -> float:
    """Mean difference of an example's loss."""
    return sum(abs(half.losses[index] - loss) for index, loss in wanted.losses.items()) / len(wanted.losses)


@pytest.mark.parametrize("attention", ["merged", "joined", "flex"])
def test_bfloat16_is_as_close_as_standalone(folder: Path, attention: str) -> None:
    """Over several draws of the weights: in a single one a few roundings decide which side is closer."""
    pytest.importorskip("fla")
    for name, error in (("gradient", whole_error), ("loss", loss_error)):
        pack, alone = [], []
        for draw in range(DRAWS):
            wanted = truth(folder, torch.bfloat16, draw)
            pack.append(error(bfloat16(folder, attention, draw), wanted))
            alone.append(error(bfloat16(folder, None, draw), wanted))
        ratio = root_mean_square(pack) / root_mean_square(alone)
        figures = {"attention": attention, "of": name, "packed": pack, "standalone": alone, "ratio": ratio}
        print(json.dumps(figures), flush=True)
        assert ratio <= 1.2


@cache
def bfloat16(folder: Path, attention: str | None, draw: int) -> Half:
    """Packs, or with attention None the examples alone."""
    if attention is None:
        return standalone(folder, torch.bfloat16, draw)
    return packed(folder, torch.bfloat16, attention, "fla", draw=draw)


def root_mean_square(errors: Sequence[float]) -> float:
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def trainer(root: model.Root, lr: float) -> step.Stepper:
    parameters = anatomy.trainable(root.model)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if "lora_B" in name:
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                parameter.copy_(0.1 * drawn)
    coverage = gradients.Coverage(list(parameters), frozenset(), warmup=3)
    optimizer = torch.optim.AdamW(parameters.values(), lr=lr)
    ranks = Ranks(0, 1, torch.device("cuda"), None)
    return step.Stepper(root, parameters, optimizer, ranks, coverage, seed=5, clip_norm=1.0)


def batches_of(found: Sequence[Example], most: int) -> list[Batch]:
    weights = entry_weights("example", [int(example.target.sum()) for example in found])
    return [collate(pack, found, weights) for pack in packs_of(found, most)]


def taken(run: step.Stepper) -> dict[str, Tensor]:
    return {name: parameter.grad.double() for name, parameter in run.parameters.items() if parameter.grad is not None}


def test_updates_of_adapters_with_dropout(folder: Path) -> None:
    """Recomputation draws the same masks on CUDA; losses fall; masters stay float32."""
    pytest.importorskip("fla")
    batches, first, runs = batches_of(examples(folder, "both"), 200), [], []
    for recompute in (False, True):
        root = root_of(torch.bfloat16, "merged", "fla", images=True, recompute=recompute, rank=4, dropout=0.3)
        runs.append(trainer(root, 2e-3))
        step.update(runs[-1], 0, 0.0, batches)
        first.append(Half({}, taken(runs[-1])))
    print("recomputed", whole_error(first[1], first[0]))
    assert whole_error(first[1], first[0]) < 2e-2
    step.update(runs[1], 1, 0.0, batches)
    assert whole_error(Half({}, taken(runs[1])), first[0]) > 0.1
    losses = [step.update(runs[1], number, 2e-3, batches).loss for number in range(2, 8)]
    print(losses)
    assert losses[-1] < 0.8 * losses[0]
    assert {parameter.dtype for parameter in runs[1].parameters.values()} == {torch.float32}


@pytest.mark.parametrize("attention", ["merged", "flex"])
def test_no_layer_waits_for_the_device(folder: Path, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole decoder layers, forward and recomputed, and the whole backward; with a pack that is new to them."""
    pytest.importorskip("fla")
    found = examples(folder, "neither")
    root = root_of(torch.bfloat16, attention, "fla", images=False, rank=4, dropout=0.3)
    root(batches_of(found, 4096)[0].to("cuda"), draw="0").loss.backward()
    run, inside = unit.UnitForward._run, []

    def strictly(self: unit.UnitForward, *args: Any, **kwargs: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        inside.append(self)
        try:
            return run(self, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    monkeypatch.setattr(unit.UnitForward, "_run", strictly)
    (batch,) = [replaced.to("cuda") for replaced in batches_of(found, 4096)]
    loss = root(batch, draw="1").loss
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(inside) == 2 * len(root.anatomy.layers)


@pytest.mark.parametrize("most", [4096, 200])
@pytest.mark.parametrize("attention", ["dense", "auto"])
def test_float32(folder: Path, attention: str, most: int) -> None:
    """`auto`: FlexAttention, since merged pieces are of 16 bits there."""
    wanted, found = truth(folder, torch.float32), packed(folder, torch.float32, attention, "reference", most)
    print(attention, most, "loss", loss_error(found, wanted), "gradient", worst_error(found, wanted))
    assert loss_error(found, wanted) < 5e-6
    assert worst_error(found, wanted)[0] < 5e-5


@pytest.fixture
def pins_for_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pins with one stage: made for bfloat16 they ask for more shared memory in float32 than there is."""
    for path in kernel_pins.folder(torch.cuda.get_device_name()).glob("*.json"):
        document = json.loads(path.read_text())
        if "default_config" in document:
            document["default_config"]["num_stages"] = 1
        (tmp_path / path.name).write_text(json.dumps(document))
    monkeypatch.setenv("FLA_CONFIG_DIR", str(tmp_path))


@pytest.mark.usefixtures("pins_for_float32")
def test_float32_through_flash_linear_attention(folder: Path) -> None:
    """Its products round to TF32, in packs as in transformers' model."""
    pytest.importorskip("fla")
    wanted, alone = truth(folder, torch.float32), standalone(folder, torch.float32)
    found = packed(folder, torch.float32, "auto", "fla")
    print("packed", whole_error(found, wanted), "standalone", whole_error(alone, wanted))
    assert whole_error(found, wanted) <= 1.2 * whole_error(alone, wanted)
