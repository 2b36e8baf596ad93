"""What `auto` means for which model on which machine, and what is refused by name. Machines are records: no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from configs.errors import UserError
from configs.schema import Config, MemoryConfig, ModelConfig, SlurmConfig
from prefix_train import anatomy, heads, kernel_choice, machine, model, outcome, residual, unit
from prefix_train.families import NotExact, find_parts
from prefix_train.geometry import Geometry
from prefix_train.kernel_choice import ASSUMED, CPU, Kernels, Machine, Model
from tests import models
from tests.machines import A100, H200

BEST = Kernels("joined", "fla_forest", "fused", "fused")
BEFORE = Kernels("merged", "fla", "liger", "torch")
ON_CPU = Kernels("merged", "reference", "torch", "torch")
TEXT = Model("bfloat16", head_size=256, width=4)


def auto(model: Model, where: Machine) -> Kernels:
    return named(("auto",) * 4, model, where)


def named(asked: Any, model: Model, where: Machine) -> Kernels:
    rules = (kernel_choice.attention, kernel_choice.deltanet, kernel_choice.elementwise, kernel_choice.heads)
    return Kernels(*(rule(one, model, where) for rule, one in zip(rules, asked, strict=True)))


def without(*packages: str) -> Machine:
    return replace(H200, packages=H200.packages - set(packages))


@pytest.mark.parametrize(
    ("where", "found"),
    [
        (H200, BEST),
        (A100, BEFORE),
        (Machine("cuda", None), BEFORE),
        (Machine("cuda", (10, 0)), BEFORE),
        (CPU, ON_CPU),
        (Machine("meta"), ON_CPU),
        (without("triton", "fla", "liger_kernel"), Kernels("merged", "fla", "torch", "torch")),
        (without("triton"), BEFORE),
        (without("fla"), BEST._replace(deltanet="fla")),
        (without("liger_kernel"), BEST._replace(elementwise="torch")),
    ],
    ids=str,
)
def test_what_was_measured_best_is_taken_where_it_was_measured(where: Machine, found: Kernels) -> None:
    assert auto(TEXT, where) == found


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"dtype": "float32"}, BEST._replace(attention="flex")),
        ({"dtype": "float64"}, Kernels("flex", "fla", "fused", "torch")),
        ({"head_size": 100}, BEST._replace(attention="flex")),
        ({"head_size": 12}, BEST._replace(attention="dense")),
        ({"head_size": 264}, BEST._replace(attention="flex", heads="torch")),
        ({"width": 5}, BEST._replace(deltanet="fla")),
        ({"width": 0}, BEST),
        ({"odd_heads": True}, BEST._replace(heads="torch")),
        ({"odd_sums": True}, BEST._replace(elementwise="liger")),
        ({"tiled": False}, BEST._replace(elementwise="torch")),
        ({"streams": True}, BEFORE),
    ],
    ids=str,
)
def test_what_a_kernel_does_not_take_falls_to_the_other_one(changes: dict[str, Any], found: Kernels) -> None:
    assert auto(replace(TEXT, **changes), H200) == found


@pytest.mark.parametrize(
    ("changes", "where", "asked", "message"),
    [
        ({}, CPU, ("joined", "auto", "auto", "auto"), "'joined' run on CUDA, not on cpu: set model.attention=merged"),
        ({}, CPU, ("auto", "fla_forest", "auto", "auto"), "'fla_forest' run on CUDA, not on cpu: set model.deltanet"),
        ({}, CPU, ("auto", "auto", "fused", "auto"), "elementwise=fused runs on CUDA, not on cpu: set it to auto"),
        ({}, CPU, ("auto", "auto", "auto", "fused"), "heads=fused runs on CUDA, not on cpu: set model.heads=torch"),
        ({}, without("triton"), ("joined", "auto", "auto", "auto"), "'joined' need Triton: pip install triton, or set"),
        ({}, without("triton"), ("auto", "fla_forest", "auto", "auto"), "'fla_forest' need Triton: pip install triton"),
        ({}, without("triton"), ("auto", "auto", "fused", "auto"), "fused needs Triton"),
        ({}, without("triton"), ("auto", "auto", "auto", "fused"), "heads=fused needs Triton: pip install triton, or"),
        ({}, without("fla"), ("auto", "fla", "auto", "auto"), "'fla' need flash-linear-attention: install it as docs"),
        ({}, without("liger_kernel"), ("auto", "auto", "liger", "auto"), "liger needs Liger: pip install liger-kernel"),
        ({"dtype": "float32"}, H200, ("merged", "auto", "auto", "auto"), "take bfloat16 .*, not float32 with heads of"),
        ({"head_size": 100}, A100, ("joined", "auto", "auto", "auto"), "not bfloat16 with heads of 100: set model.att"),
        ({"width": 6}, H200, ("auto", "fla_forest", "auto", "auto"), "up to 4, not bfloat16 and 6: set model.deltanet"),
        ({"odd_sums": True}, H200, ("auto", "auto", "fused", "auto"), "norms behind their mixer: set model.elementwis"),
        ({"odd_heads": True}, H200, ("auto", "auto", "auto", "fused"), "not take attention that normalises all heads"),
        ({"head_size": 512}, H200, ("flex", "auto", "auto", "fused"), "not take heads of 512, only of up to 256: set"),
        ({}, H200, ("flash", "auto", "auto", "auto"), "'flash' are unknown: write auto, merged, joined, flex, dense"),
    ],
    ids=str,
)
def test_what_is_asked_for_by_name_and_cannot_be_had_is_an_error(
    changes: dict[str, Any], where: Machine, asked: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        named(asked, replace(TEXT, **changes), where)


def test_names_are_taken_on_other_chips_too() -> None:
    assert named(BEST, TEXT, A100) == BEST
    assert named(BEST, replace(TEXT, streams=True), H200) == BEST


@pytest.mark.parametrize("family", models.FAMILIES)
def test_rules_say_of_a_family_what_its_modules_say(family: str) -> None:
    """The facts come from a model's configuration; here they are held against its modules."""
    base = models.build(family, torch.float32)
    config = Config(model=ModelConfig(dtype="float32"), memory=MemoryConfig())
    facts = Model.of(config, Geometry.of(base.config.to_dict()))
    parts = find_parts(base)
    try:
        kinds = heads.kinds(parts)
    except NotExact:
        kinds = {}
    assert facts.odd_heads == (not kinds)
    sizes = {int(module.head_dim) for module in parts.attention.values()}
    assert sizes == {facts.head_size}
    assert {int(module.conv_kernel_size) for module in parts.delta_nets.values()} in ({facts.width}, set())
    assert bool(parts.delta_nets) == bool(facts.width)
    trained = replace(config, train=replace(config.train, trainable="all"))
    layers = anatomy.find(model.prepare(base, trained)).layers
    sums = [isinstance(unit._forward_of(layer)._inner, residual.Layer) for layer in layers]
    assert facts.odd_sums == (not all(sums))


BUILD = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 64}


def test_a_run_and_its_report_and_its_budget_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine that is said to be an H200."""
    config = Config(model=ModelConfig(build=BUILD), slurm=SlurmConfig(gpus_per_node=1))
    device = torch.device("cuda", 0)
    monkeypatch.setitem(machine._machines, device, H200)
    assert machine.chosen(config, device) == BEST
    assert kernel_choice.choose(config, H200) == BEST
    reported = outcome.kernels(config, device)
    assert {name: reported[name] for name in Kernels._fields} == BEST._asdict()
    settled = machine.settle(config, device)
    assert tuple(getattr(settled.model, name) for name in Kernels._fields) == BEST
    assert machine.settle(settled, device) == settled
    assert machine.chosen(replace(config, engine="stream"), device) == BEFORE


def test_who_plans_takes_this_machine_s_gpu_else_the_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus = Config(slurm=SlurmConfig(gpus_per_node=1))
    assert kernel_choice.expected(Config()) == CPU
    for said, found in (
        ([], ASSUMED),
        (["[N/A]"], ASSUMED),
        (["9.0", "8.0"], Machine("cuda", (8, 0), kernel_choice.importable())),
    ):
        monkeypatch.setattr(kernel_choice.smi, "ask", lambda field, said=said: said)
        kernel_choice.here.cache_clear()
        assert kernel_choice.expected(on_gpus) == found
    kernel_choice.here.cache_clear()
    assert str(ASSUMED) == "a GPU of compute capability 9.0, assumed"
    assert str(CPU) == "a CPU"
