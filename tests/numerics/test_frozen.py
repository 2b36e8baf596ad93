"""Products with frozen weights and their adapters, backward written out, against PEFT's own modules and autograd."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from prefix_train import anatomy, frozen, products, step, tiles
from prefix_train.dropout import SeededDropout
from tests import batches, models
from tests.numerics.test_tiles import COUNT, LINEAR, built, options, run, trainer_of, worst

pytestmark = pytest.mark.usefixtures("small_blocks")


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(6, 10, bias), nn.Linear(6, 10, bias)
        self.down_proj, self.act_fn = nn.Linear(10, 6, bias), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


def adapted(targets: list[str], drop: float, bias: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    """A block whose `targets` have adapters with values, as PEFT and `adapters.attach` make them."""
    torch.manual_seed(3)
    config = LoraConfig(r=2, lora_alpha=3, lora_dropout=drop, target_modules=targets)
    block = get_peft_model(Block(bias), config).base_model.model  # type: ignore[arg-type]
    for name, module in block.named_modules():
        if hasattr(module, "lora_dropout"):
            nn.init.normal_(module.lora_B["default"].weight, 0.0, 0.5)
            if drop:
                module.lora_dropout["default"] = SeededDropout(drop, name)
                module.lora_dropout["default"].draw = "1/2/3"
    return block.to(dtype).train()


def both(block: Any, x: Tensor, fast: Any) -> list[list[Tensor]]:
    """Output and gradients, of x and of every adapter, through the module's own forward and through `fast`."""
    weight = torch.randn((*x.shape[:-1], fast(x).shape[-1]), dtype=x.dtype)
    learned = [one for one in block.parameters() if one.requires_grad]
    found = []
    for forward in (type(block).forward.__get__(block), fast):
        given = x.clone().requires_grad_()
        out = forward(given)
        found.append([out.detach(), *torch.autograd.grad((out * weight).sum(), [given, *learned])])
    return found


TARGETS = [["gate_proj"], ["up_proj", "down_proj"], ["gate_proj", "up_proj", "down_proj"]]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("drop", [0.0, 0.4])
@pytest.mark.parametrize("targets", TARGETS)
def test_a_feed_forward_and_its_linear_modules(targets: list[str], drop: float, bias: bool) -> None:
    block = adapted(targets, drop, bias)
    x = torch.randn(1, 11, 6, dtype=torch.float64)
    mine = frozen.FeedForward(block, 4, "torch", lambda _: pytest.fail("not what is written out"))
    for whole, tiled in zip(*both(block, x, mine), strict=True):
        torch.testing.assert_close(tiled, whole, rtol=1e-12, atol=1e-12)
    for name in targets:
        module = getattr(block, name)
        x = torch.randn(3, 7, module.in_features, dtype=torch.float64)
        alone = frozen.Adapted(module, 8, lambda _: pytest.fail("not what is written out"))
        for whole, tiled in zip(*both(module, x, alone), strict=True):
            torch.testing.assert_close(tiled, whole, rtol=1e-12, atol=1e-12)


def test_bfloat16_rounds_no_more_than_the_module_s_own_operations() -> None:
    rounded = adapted(["gate_proj", "up_proj", "down_proj"], 0.0).bfloat16()
    errors = []
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn(1, 257, 6, dtype=torch.bfloat16)
        torch.manual_seed(seed)
        wide = copy.deepcopy(rounded).double()
        truth, _ = both(wide, x.double(), frozen.FeedForward(wide, 64, "torch", wide))
        torch.manual_seed(seed)
        theirs, mine = both(rounded, x, frozen.FeedForward(rounded, 64, "torch", rounded))
        errors.append([_off(mine[0], truth[0]), _off(theirs[0], truth[0])])
    ours, own = torch.tensor(errors).square().mean(0).sqrt().tolist()
    assert 0 < ours <= 1.05 * own


def _off(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def test_what_is_not_so_is_left_to_what_was_there() -> None:
    block = adapted(["gate_proj"], 0.0)
    x = torch.randn(1, 5, 6, dtype=torch.float64)
    mine = frozen.FeedForward(block, 4, "torch", lambda x: x)
    alone = frozen.Adapted(block.gate_proj, 4, lambda x: x)
    assert mine(x) is not x
    assert alone(x) is not x
    for change, undo in (
        (lambda: block.gate_proj.enable_adapters(False), lambda: block.gate_proj.enable_adapters(True)),
        (lambda: block.gate_proj.merge(), lambda: block.gate_proj.unmerge()),
        (
            lambda: block.gate_proj.base_layer.requires_grad_(True),
            lambda: block.gate_proj.base_layer.requires_grad_(False),
        ),
        (lambda: block.gate_proj.lora_A.float(), lambda: block.gate_proj.lora_A.double()),
    ):
        change()
        assert mine(x) is x
        assert alone(x) is x
        undo()
        assert mine(x) is not x
        assert alone(x) is not x


def test_other_modules_are_not_known() -> None:
    config = {"r": 2, "target_modules": ["gate_proj"]}
    for more in ({"use_dora": True}, {"lora_bias": True}):
        block = get_peft_model(Block(True), LoraConfig(**config, **more)).base_model.model  # type: ignore[arg-type]
        assert not products.knows(block.gate_proj)
        assert products.knows(block.up_proj)
    assert not products.knows(nn.Bilinear(2, 2, 2))


class Products(TorchDispatchMode):
    """Rows that were multiplied by each of `weights`, [in, out] as a forward multiplies."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.weights = {
            weight.data_ptr(): (name, weight.mT.shape, weight.mT.stride()) for name, weight in weights.items()
        }
        self.rows: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            left, right = args[-2:]
            name, *place = self.weights.get(right.data_ptr(), (None,))
            if name is not None and [right.shape, right.stride()] == place:
                self.rows[name] += len(left)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("wide")
def test_a_model_computes_the_same_gradients_and_no_product_that_nothing_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, base = [], built("llama")
    packs = batches.batches(batches.make(base, COUNT), [[0, 1, 2, 3, 4, 5, 6]])
    for known in (True, False):
        with monkeypatch.context() as patch:
            if not known:
                patch.setattr(products, "knows", lambda _: False)
            trainer = trainer_of(copy.deepcopy(base), options("adapter", 8, LINEAR), False)
        forwards = [module.forward for module in trainer.root.modules()]
        assert known == any(isinstance(forward, frozen.FeedForward) for forward in forwards)
        assert known == any(isinstance(forward, frozen.Adapted) for forward in forwards)
        found.append(run(trainer, packs))
        if known:
            layer: Any = trainer.root.anatomy.layers[0]
            names = {"gate": layer.mlp.gate_proj, "down": layer.mlp.down_proj, "query": layer.self_attn.q_proj}
            with Products({name: module.base_layer.weight for name, module in names.items()}) as counted:
                step.update(trainer, 0, 0.0, packs)
            positions = packs[0].positions
            # Forward; gate's again for its tile's backward, the query's in its layer's recomputation.
            assert counted.rows == {"gate": 2 * positions, "down": positions, "query": 2 * positions}
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    assert worst(found[0][1], found[1][1]) < 1e-10


def test_trained_weights_are_left_to_tiles() -> None:
    trainer = trainer_of(models.build("llama", torch.float32), options("all", 8), False)
    block: Any = anatomy.find(trainer.root.model).layers[0].mlp
    assert isinstance(block.forward, frozen.FeedForward)
    assert isinstance(block.forward.otherwise, tiles.Tiled)
    assert not any(product.ready(torch.zeros(1)) for product in block.forward.products)
