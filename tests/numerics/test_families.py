"""A pack trains as its examples alone, in every family; and the public faults that this replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointError, checkpoint

from prefix_train.families import NotExact
from prefix_train.layout import Layout
from prefix_train.patch import Handle, Mixer, install, shared_prefix
from tests import forests, models, oracle

TREE = ([5, 65, 3, 1, 4, 2, 66], [-1, 0, 1, 1, 0, 4, -1])
"""Two roots, three levels, segments around a chunk's length and around the convolution's width."""


def make(family: str, dtype: torch.dtype, images: tuple[int, ...] = (0, 2)) -> tuple[Any, forests.Pack]:
    model = models.build(family, dtype)
    return model, forests.build(model, *TREE, images=images if family in models.WITH_VISION else ())


def recompute(model: nn.Module) -> None:
    model.activation_checkpointing_enable({"use_reentrant": False})


@pytest.mark.parametrize("family", models.FAMILIES)
def test_pack_equals_its_examples_in_float64(family: str) -> None:
    model, pack = make(family, torch.float64)
    with oracle.float64():
        alone = oracle.run(model, pack.examples, models.IMAGE)
        packed = forests.run(model, pack)
        recompute(model)
        recomputed = forests.run(model, pack)
    forests.assert_same(packed, alone, hidden=1e-10, gradient=1e-10)
    forests.assert_same(recomputed, alone, hidden=1e-10, gradient=1e-10)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_pack_equals_stock_float32(family: str) -> None:
    model, pack = make(family, torch.float32)
    alone = oracle.run(model, pack.examples, models.IMAGE)
    recompute(model)
    forests.assert_same(forests.run(model, pack), alone, hidden=5e-6, gradient=5e-5)


@pytest.mark.parametrize("family", models.WITH_VISION)
@pytest.mark.parametrize("images", [(), (0,), (2, 3), (0, 1, 2, 5)], ids=["neither", "prefix", "item", "both"])
def test_images_of_prefix_and_item(family: str, images: tuple[int, ...]) -> None:
    model, pack = make(family, torch.float64, images)
    recompute(model)
    with oracle.float64():
        forests.assert_same(
            forests.run(model, pack), oracle.run(model, pack.examples, models.IMAGE), hidden=1e-10, gradient=1e-10
        )


def routes(model: nn.Module, run: Callable[[], object]) -> list[torch.Tensor]:
    """The experts that each router chose while `run` ran, in order."""
    chosen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _args, out: chosen.append(out[2].sort(-1).values))
        for module in model.modules()
        if type(module).__name__.endswith("TopKRouter")
    ]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return chosen


def share_routed_alike(model: nn.Module, pack: forests.Pack) -> float:
    """Share of (token, layer) pairs of the examples that the pack routes to the experts they go to alone."""
    with shared_prefix(model):
        packed = routes(model, lambda: forests.forward(model, pack))
    same = total = 0
    for example, rows in zip(pack.examples, pack.rows, strict=True):
        given = oracle.inputs(example, models.IMAGE)
        alone = routes(model, partial(model.model, **given, use_cache=False))
        for mine, theirs in zip(packed, alone, strict=True):
            same += int((mine[rows] == theirs).all(-1).sum())
            total += len(rows)
    return same / total


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe"])
def test_routing_is_alike(family: str, record_property: Callable[[str, object], None]) -> None:
    assert share_routed_alike(*make(family, torch.float32)) == 1
    share = share_routed_alike(*make(family, torch.bfloat16))
    record_property("share_routed_alike_bfloat16", share)
    print(f"{family}: {share:.4f} of the tokens are routed alike in bfloat16")
    assert share > 0.95


@pytest.mark.parametrize("attention", ["dense", "merged"])
def test_every_attention_kernel(attention: str) -> None:
    model, pack = make("qwen3_5_text", torch.float64)
    with oracle.float64():
        alone = oracle.run(model, pack.examples)
        forests.assert_same(forests.run(model, pack, attention), alone, hidden=1e-10, gradient=1e-10)


def test_adapters_of_peft() -> None:
    from peft import LoraConfig, get_peft_model

    base, pack = make("qwen3_5", torch.float64)
    wanted = ["q_proj", "o_proj", "in_proj_qkv", "out_proj", "gate_proj"]
    model = get_peft_model(base, LoraConfig(r=2, target_modules=wanted, modules_to_save=["merger"]))
    model.double()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    with oracle.float64():
        alone = oracle.run(base, pack.examples, models.IMAGE)
        packed = forests.run(base, pack)
        with shared_prefix(model):
            whole = model(
                input_ids=pack.ids[None],
                position_ids=pack.position_ids,
                pixel_values=pack.pixels,
                image_grid_thw=pack.grids,
                layout=pack.layout,
                use_cache=False,
            )
    forests.assert_same(packed, alone, hidden=1e-10, gradient=1e-10)
    assert any("lora_B" in name for name in packed.gradients)
    assert any("merger" in name for name in packed.gradients)
    logits = torch.stack([base.lm_head(hidden[-1]) for hidden in alone.hidden])
    ends = torch.stack([whole.logits[0, rows[-1]] for rows in pack.rows])
    torch.testing.assert_close(ends, logits, rtol=0, atol=1e-10)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("before", [True, False], ids=["patched before sharding", "patched after"])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_sharded_modules(family: str, before: bool) -> None:
    model, pack = make(family, torch.float32)
    recompute(model)
    plain = forests.run(model, pack)
    handle = install(model) if before else None
    for layer in (*model.model.visual.blocks, *model.model.language_model.layers):
        fully_shard(layer)
    fully_shard(model.model)
    handle = handle or install(model)
    sharded = forests.forward(model, pack)
    sharded.loss.backward()
    for name, parameter in model.named_parameters():
        grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        torch.testing.assert_close(grad, plain.gradients[name], rtol=1e-6, atol=1e-7)
    handle.remove()


FAULTS = {
    "attention": ("prefix_train.attention.tree_attention", 3),
    "convolution": ("prefix_train.deltanet.tree_conv_parts", 3),
    "delta rule": ("prefix_train.deltanet.tree_delta_rule_parts", 5),
}
"""A token mixer, and which of its arguments is the layout."""


def without_boundaries(monkeypatch: pytest.MonkeyPatch, target: str, place: int) -> None:
    """Plant the fault: this mixer takes the buffer for one sequence."""
    module, name = target.rsplit(".", 1)
    real = getattr(__import__(module, fromlist=[name]), name)

    def leaking(*args: Any, **kwargs: Any) -> Any:
        one = Layout.from_tree([args[place].total], [-1])
        return real(*args[:place], one, *args[place + 1 :], **kwargs)

    monkeypatch.setattr(target, leaking)


def change_one_continuation(family: str) -> tuple[bool, bool]:
    """Other tokens in one continuation without loss: are the others' outputs, and all gradients, the same bits?"""
    model, pack = make(family, torch.float32, images=())
    changed = 1
    pack.examples[changed].weights.zero_()
    own = pack.rows[changed][-pack.layout.lengths[3] :]
    first = forests.run(model, pack)
    pack.ids[own] = (pack.ids[own] + 17) % models.IMAGE
    second = forests.run(model, pack)
    others = [index for index in range(len(pack.rows)) if index != changed]
    outputs = all(torch.equal(first.hidden[index], second.hidden[index]) for index in others)
    assert not torch.equal(first.hidden[changed][-1], second.hidden[changed][-1])
    return outputs, all(torch.equal(first.gradients[name], second.gradients[name]) for name in first.gradients)


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo_hybrid", "qwen3_vl", "qwen3_5_text", "qwen3_5"])
def test_r01_a_continuation_reaches_no_other(family: str) -> None:
    assert change_one_continuation(family) == (True, True)


@pytest.mark.parametrize("fault", FAULTS)
def test_r01_fails_without_fix(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_boundaries(monkeypatch, *FAULTS[fault])
    outputs, gradients = change_one_continuation("qwen3_5_text")
    assert not outputs
    assert not gradients


def drop_layout(model: nn.Module, index: int) -> None:
    """Plant the fault: one decoder layer passes no layout on."""
    layer = model.model.layers[index]
    layer.forward = lambda *args, layout, **kwargs: type(layer).forward(layer, *args, **kwargs)


@pytest.mark.parametrize(("index", "name"), [(1, "model.layers.1.linear_attn"), (3, "model.layers.3.self_attn")])
def test_r03_start_fails_where_the_layout_does_not_arrive(index: int, name: str) -> None:
    model = models.build("qwen3_5_text")
    drop_layout(model, index)
    with pytest.raises(NotExact, match=f"^{name}: no layout reached this layer"):
        install(model)
    assert "forward" not in vars(model.model)


def test_r03_fails_without_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handle, "probe", lambda _self: None)
    model = models.build("qwen3_5_text")
    drop_layout(model, 1)
    install(model)
    assert "forward" in vars(model.model), "installed without a word"


def test_r03_a_mixer_that_is_never_called_is_named() -> None:
    model = models.build("qwen3_5_text")
    model.model.layers[2].forward = lambda hidden, **_: hidden
    with pytest.raises(NotExact, match=r"^model\.layers\.2\.linear_attn: the forward ended"):
        install(model)


def falling(position_ids: torch.Tensor) -> list[int]:
    """Lengths of the runs in which the height ids do not fall: what the fault took for sequences."""
    heights = position_ids[1, 0]
    cuts = [0, *(torch.nonzero(heights[1:] <= heights[:-1]).flatten() + 1).tolist(), len(heights)]
    return [end - start for start, end in pairwise(cuts)]


def test_r05_position_ids_are_no_boundaries() -> None:
    model, pack = make("qwen3_5", torch.float64)
    lengths = falling(pack.position_ids)
    assert lengths != list(pack.layout.lengths)
    with oracle.float64():
        alone = oracle.run(model, pack.examples, models.IMAGE)
        forests.assert_same(forests.run(model, pack), alone, hidden=1e-10, gradient=1e-10)
        pack.layout = Layout.from_tree(lengths, [-1] * len(lengths))
        with pytest.raises(AssertionError):
            forests.assert_same(forests.run(model, pack), alone, hidden=1e-10, gradient=1e-10)


def builds(model: nn.Module, pack: forests.Pack) -> int:
    """Layouts built by one forward and backward with recomputation."""
    recompute(model)
    with shared_prefix(model):
        before = Layout.builds
        forests.forward(model, pack).loss.backward()
        return Layout.builds - before


def test_r18_one_build_per_pack() -> None:
    before = Layout.builds
    model, pack = make("qwen3_5_text", torch.float32)
    assert Layout.builds - before == 1
    assert builds(model, pack) == 0


def test_r18_fails_without_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Mixer.admit

    def rebuild(self: Mixer, layout: Layout, length: int) -> Layout:
        admit(self, layout, length)
        return Layout.from_tree(layout.lengths, layout.parents)

    monkeypatch.setattr(Mixer, "admit", rebuild)
    assert builds(*make("qwen3_5_text", torch.float32)) == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_r20_autocast_is_refused(dtype: torch.dtype) -> None:
    model, pack = make("qwen3_5_text", dtype)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(NotExact, match="autocast is on"):
        install(model)
    with shared_prefix(model), torch.autocast("cpu", torch.bfloat16), pytest.raises(NotExact, match="autocast is on"):
        forests.forward(model, pack)


def test_r20_fails_without_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefix_train.inputs.refuse_autocast", lambda _device: None)
    model, pack = make("qwen3_5_text", torch.bfloat16)
    outside = (nullcontext(), torch.autocast("cpu", enabled=False))
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": lambda: outside})
    with shared_prefix(model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = forests.forward(model, pack).loss
        with pytest.raises(CheckpointError):
            loss.backward()


def admitted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """Every (mixer, layout) from now on."""
    seen: list[tuple[str, object]] = []
    admit = Mixer.admit

    def spy(self: Mixer, layout: object, length: int) -> Layout:
        seen.append((self.name, layout))
        return admit(self, layout, length)

    monkeypatch.setattr(Mixer, "admit", spy)
    return seen


def test_r27_recomputed_layers_see_the_same_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    model, pack = make("qwen3_5_text", torch.float32)
    plain = forests.run(model, pack)
    recompute(model)
    with shared_prefix(model):
        seen = admitted(monkeypatch)
        result = forests.forward(model, pack)
        forward = [name for name, _ in seen]
        result.loss.backward()
    assert [name for name, _ in seen] == forward + forward[::-1]
    assert len(set(forward)) == len(forward) == 4
    assert all(layout is pack.layout for _, layout in seen)
    found = oracle.gradients(model)
    assert all(torch.equal(found[name], plain.gradients[name]) for name in found)


def test_r27_two_packs_before_one_backward() -> None:
    model, pack = make("qwen3_5_text", torch.float32)
    other = forests.build(model, [64, 3, 7], [-1, 0, 0], seed=1)
    one, two = forests.run(model, pack), forests.run(model, other)
    recompute(model)
    with shared_prefix(model):
        (forests.forward(model, pack).loss + forests.forward(model, other).loss).backward()
    for name, gradient in oracle.gradients(model).items():
        torch.testing.assert_close(gradient, one.gradients[name] + two.gradients[name], rtol=1e-4, atol=1e-5)


def test_r27_fails_without_fix() -> None:
    def forgetful(layer: partial[Any], *args: Any) -> Any:
        calls = iter([layer, partial(layer, layout=None)])
        return checkpoint(lambda *inner: next(calls)(*inner), *args, use_reentrant=False)

    model, pack = make("qwen3_5_text", torch.float32)
    recompute(model)
    for layer in model.model.layers:
        layer._gradient_checkpointing_func = forgetful
    with shared_prefix(model):
        loss = forests.forward(model, pack).loss
        with pytest.raises(NotExact, match="no layout reached this layer"):
            loss.backward()


EXAMPLE = """
from prefix_train import Layout, shared_prefix
layout = Layout.from_tree(lengths=[64000, 1000, 1000], parents=[-1, 0, 0])     # depth-first order
with shared_prefix(model):                                                       # a transformers model instance; text-only ids are 1 x T, with images pass 3 x 1 x T
    out = model(input_ids=ids, position_ids=layout.position_ids(), layout=layout, use_cache=False)
"""  # noqa: E501, as it is documented


@pytest.mark.parametrize("family", models.FAMILIES)
def test_documented_example(family: str) -> None:
    model = models.build(family)
    ids = torch.randint(models.IMAGE, (1, 84))
    scope: dict[str, Any] = {"model": model, "ids": ids}
    exec(EXAMPLE.replace("000", "").replace("64,", "82,"), scope)  # noqa: S102
    for rows in (torch.arange(83), torch.tensor([*range(82), 83])):
        alone = model(input_ids=ids[:, rows], use_cache=False).logits
        torch.testing.assert_close(scope["out"].logits[:, rows], alone, rtol=1e-4, atol=1e-4)
