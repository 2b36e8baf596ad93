"""Linear modules that read the same rows, computed together, against each by itself: outputs and every gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from prefix_train import dropout, frozen, together
from prefix_train.dropout import SeededDropout
from prefix_train.together import Member
from tests import batches, models
from tests.live_bytes import LiveBytes
from tests.numerics.test_frozen import Products
from tests.offloading import backward, trained

NAMES = ("q_proj", "k_proj", "v_proj")
WIDTH, ROWS = 6, 11


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "BLOCK", 4)


class Mixer(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, 10, bias), nn.Linear(WIDTH, 3, bias)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, 5, bias), nn.Linear(5, WIDTH, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def made(targets: list[str], drop: float, bias: bool) -> Any:
    """A mixer whose `targets` have adapters with values, as PEFT and `adapters.attach` make them."""
    torch.manual_seed(3)
    if not targets:
        return Mixer(bias).double().requires_grad_(False)
    config = LoraConfig(r=2, lora_alpha=3, lora_dropout=drop, target_modules=targets)
    mixer = get_peft_model(Mixer(bias), config).base_model.model  # type: ignore[arg-type]
    for name, module in mixer.named_modules():
        if hasattr(module, "lora_dropout"):
            nn.init.normal_(module.lora_B["default"].weight, 0.0, 0.5)
            if drop:
                module.lora_dropout["default"] = SeededDropout(drop, name)
                module.lora_dropout["default"].draw = "1/2/3"
    return mixer.double().train()


def installed(mixer: Any, rows: int = 4) -> Any:
    """A copy whose modules compute together, and never otherwise."""
    mixer = copy.deepcopy(mixer)
    together.install(mixer, rows)
    for name in NAMES:
        getattr(mixer, name).forward.otherwise = lambda _: pytest.fail("by itself")
    return mixer


def through(mixer: Any, x: Tensor, used: tuple[int, ...] = (0, 1, 2)) -> list[Tensor]:
    """Outputs, and the gradients of x and of what learns, of a sum over the outputs `used`."""
    given = x.clone().requires_grad_()
    outs = mixer(given)
    learned = [one for one in mixer.parameters() if one.requires_grad]
    total = sum(outs[one].sin().sum() for one in used)
    grads = torch.autograd.grad(total, [given, *learned], allow_unused=True)
    return [*(one.detach() for one in outs), *(torch.zeros(()) if one is None else one for one in grads)]


def close(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


TARGETS = [[], ["q_proj"], ["k_proj", "v_proj"], [*NAMES]]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("drop", [0.0, 0.4])
@pytest.mark.parametrize("targets", TARGETS, ids=len)
def test_outputs_and_gradients(targets: list[str], drop: float, bias: bool) -> None:
    mixer = made(targets, drop, bias)
    for shape in ((1, ROWS, WIDTH), (3, 7, WIDTH), (1, 1, WIDTH)):
        x = torch.randn(shape, dtype=torch.float64)
        close(through(installed(mixer), x), through(mixer, x))


@pytest.mark.parametrize("used", [(0,), (1, 2), (2,)])
def test_an_output_that_nothing_uses(used: tuple[int, ...]) -> None:
    mixer, x = made(["q_proj", "v_proj"], 0.4, True), torch.randn(1, ROWS, WIDTH, dtype=torch.float64)
    close(through(installed(mixer), x, used), through(mixer, x, used))


def test_a_fault_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: the last module's gradient takes the place of the others'."""
    inner = together._backward
    monkeypatch.setattr(together, "_backward", lambda *given: inner(*given[:-1], False))
    mixer, x = made(["q_proj"], 0.4, True), torch.randn(1, ROWS, WIDTH, dtype=torch.float64)
    with pytest.raises(AssertionError):
        close(through(installed(mixer), x), through(mixer, x))


def test_an_input_without_a_gradient() -> None:
    mixer, x = made([*NAMES], 0.4, True), torch.randn(1, ROWS, WIDTH, dtype=torch.float64)
    found = []
    for one in (mixer, installed(mixer)):
        learned = [parameter for parameter in one.parameters() if parameter.requires_grad]
        found.append(list(torch.autograd.grad(sum(out.sin().sum() for out in one(x)), learned)))  # type: ignore[arg-type]
    close(found[1], found[0])


def test_each_output_belongs_to_the_tensor_that_was_given() -> None:
    """Twice the same one, others in between, equal ones, some of the modules alone: nothing stays."""
    mixer = made(["q_proj"], 0.0, True)
    mine = installed(mixer)
    first, second = torch.randn(2, 1, ROWS, WIDTH, dtype=torch.float64)
    order = [("q_proj", first), ("q_proj", first), ("k_proj", second), ("k_proj", first), ("v_proj", first.clone())]
    for name, x in [*order, ("q_proj", second), ("v_proj", second), ("k_proj", second)]:
        torch.testing.assert_close(getattr(mine, name)(x), getattr(mixer, name)(x), rtol=1e-12, atol=1e-12)
    group = mine.q_proj.forward.together
    assert (group._inputs, group._outputs) == (None, {})


def thawed(mixer: Any) -> None:
    mixer.v_proj.weight.requires_grad_(True)


def switched_off(mixer: Any) -> None:
    mixer.q_proj.enable_adapters(False)


@pytest.mark.parametrize("change", [thawed, switched_off])
def test_what_is_not_so_computes_by_itself(change: Callable[[Any], None]) -> None:
    mixer, x = made(["q_proj"], 0.4, True), torch.randn(1, ROWS, WIDTH, dtype=torch.float64)
    change(mixer)
    mine = copy.deepcopy(mixer)
    together.install(mine, 4)
    close(through(mine, x), through(mixer, x))
    assert not mine.q_proj.forward.together._outputs


def test_rows_are_kept_for_adapters_alone() -> None:
    for targets in ([], ["k_proj"]):
        kept: list[int] = []

        def pack(one: Tensor, kept: list[int] = kept) -> Tensor:
            kept.append(one.data_ptr())
            return one

        x = torch.randn(1, ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
            installed(made(targets, 0.4, False))(x)
        assert (x.data_ptr() in kept) == bool(targets)


@pytest.mark.parametrize("targets", TARGETS, ids=len)
def test_no_more_is_alive_at_a_time(targets: list[str]) -> None:
    """Than with each module by itself, its adapter in tiles."""
    peaks = []
    for grouped in (False, True):
        mixer = made(targets, 0.4, False)
        for name in targets:
            module = getattr(mixer, name)
            module.forward = frozen.Adapted(module, 4, lambda _: pytest.fail("not what is written out"))
        mine = installed(mixer) if grouped else mixer
        x = torch.randn(1, 64, WIDTH, dtype=torch.float64, requires_grad=True)
        with LiveBytes() as counted:
            outs = mine(x * 1)
            sum(out.sum() for out in outs).backward()
        peaks.append(counted.peak)
    assert peaks[1] <= peaks[0]


FAMILIES = [name for name in models.FAMILIES if name not in models.WITH_VISION]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mixer_of_a_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same gradients; each product once in forward and once in recomputation; no sums of their gradients."""
    base = models.build(family)
    packs = batches.batches(batches.make(base, 7), [[0, 1, 2, 3, 4, 5, 6]])
    recurrent = ["in_proj_z", "out_proj"] if "qwen3_5" in family else ["out_proj"] if family == "qwen3_next" else []
    given = {"rank": 2, "dropout": 0.3, "targets": ["q_proj", "v_proj", *recurrent], "tile_rows": 8}
    mine = trained(copy.deepcopy(base), packs, "none", **given)
    weights = {}
    for index, layer in enumerate(mine.stepper.root.anatomy.layers):
        group = [one.forward for one in layer.modules() if isinstance(one.forward, Member)]
        assert len({one.together for one in group}) == 1
        assert len(group) == len(group[0].together.products) >= 2
        for place, product in enumerate(group[0].together.products):
            if product.base.bias is None:  # `Products` does not count the others
                weights[f"{index}.{place}"] = product.base.weight
    with Products(weights) as counted:
        found = backward(mine, packs)
    assert counted.rows == dict.fromkeys(weights, 2 * packs[0].positions)
    assert weights or family == "qwen2"
    monkeypatch.setattr(together, "install", lambda *_: None)
    plain = trained(copy.deepcopy(base), packs, "none", **given)
    right = backward(plain, packs)
    for name, one in right.items():
        torch.testing.assert_close(found[name], one, rtol=2e-4, atol=1e-5 * float(one.abs().max()))
