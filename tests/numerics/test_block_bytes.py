"""What a block takes of a GPU on its way down, counted at real sizes without one, against the plan's terms."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from configs.schema import Config
from prefix_train import attention, layer_bytes
from prefix_train.layout import Layout
from prefix_train.shape import Shape
from prefix_train.stream import planner
from tests import block_bytes
from tests.unit.test_stream_planner import MODEL, recipe

ALL = "adapter.targets=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
PACK = ([4096, *[128] * 32], [-1, *[0] * 32])
DEEP = ([3000, 500, 200, 200, 500, 200], [-1, 0, 1, 1, 0, 4])
SHORT = ([100, *[32] * 200], [-1, *[0] * 200])
IN_A_BLOCK = {
    *("layer inputs", "residual stream", "rotary tables, copies", "one layer recomputed", "gradients in the layer")
}
MIB = 1 << 20

NARROW = {"intermediate_size": 2048}
"""A feed-forward so small that attention needs the most."""
GATED = {
    **{"model_type": "qwen3_5_text", "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4},
    **{"num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256},
}


def options(positions: int, sizes: dict[str, Any], *overrides: str) -> Config:
    build = json.dumps(MODEL | sizes)
    given = (ALL, "model.elementwise=liger", f"pack.max_positions={positions}", *overrides)
    return recipe(f"model.build={build}", *given)


def planned(config: Config, lengths: list[int], parents: list[int]) -> int:
    plan = planner.make(config, Shape.of(lengths, parents, sum(lengths) // 2))
    return sum(term.bytes for term in plan.budget.terms if term.name in IN_A_BLOCK)


@pytest.mark.parametrize(
    ("sizes", "lengths", "parents"),
    [
        pytest.param({}, [1024], [-1], id="32B, 1,024"),
        pytest.param({}, [8192], [-1], id="32B, 8,192"),
        pytest.param({}, *PACK, id="32B, a pack"),
        pytest.param(NARROW, [8192], [-1], id="attention, 8,192"),
        pytest.param(NARROW, *PACK, id="attention, a pack"),
        pytest.param(NARROW, *DEEP, id="attention, a tree"),
        pytest.param(NARROW, *SHORT, id="attention, short segments"),
        pytest.param(GATED, *PACK, id="with a gate, a pack"),
        pytest.param(GATED | NARROW, *DEEP, id="attention with a gate, a tree"),
    ],
)
def test_a_block_takes_what_is_planned(sizes: dict[str, Any], lengths: list[int], parents: list[int]) -> None:
    config = options(sum(lengths), sizes)
    with block_bytes.kernels():
        live = block_bytes.count(config, lengths, parents)
    assert live.peak == pytest.approx(planned(config, lengths, parents), rel=0.05), live.largest[:20]
    assert live.up < live.peak


@pytest.mark.parametrize("newest", [("attention=joined",), ("attention=joined", "heads=fused", "elementwise=fused")])
@pytest.mark.parametrize(
    ("sizes", "lengths", "parents"),
    [
        pytest.param({}, *PACK, id="32B, a pack"),
        pytest.param(NARROW, *PACK, id="attention, a pack"),
        pytest.param(NARROW, *DEEP, id="attention, a tree"),
        pytest.param(NARROW, *SHORT, id="attention, short segments"),
        pytest.param(NARROW, [8192], [-1], id="attention, 8,192"),
        pytest.param(GATED | NARROW, *DEEP, id="attention with a gate, a tree"),
    ],
)
def test_the_newest_kernels_take_what_is_planned(
    newest: tuple[str, ...], sizes: dict[str, Any], lengths: list[int], parents: list[int]
) -> None:
    config = options(sum(lengths), sizes, *(f"model.{choice}" for choice in newest))
    with block_bytes.kernels():
        live = block_bytes.count(config, lengths, parents)
    assert live.peak == pytest.approx(planned(config, lengths, parents), rel=0.05), live.largest[:20]


def test_flash_attention_takes_as_much() -> None:
    config = options(sum(PACK[0]), NARROW)
    with block_bytes.kernels(cudnn=False):
        live = block_bytes.count(config, *PACK)
    assert live.peak == pytest.approx(planned(config, *PACK), rel=0.05), live.largest[:20]


def test_without_liger_an_activation_takes_more() -> None:
    config = options(4096, {}, "model.elementwise=torch")
    with block_bytes.kernels(fuses=False):
        live = block_bytes.count(config, [4096], [-1])
    assert live.peak == pytest.approx(planned(config, [4096], [-1]), rel=0.05), live.largest[:20]


@pytest.mark.parametrize(
    ("heads", "size", "lengths", "parents"),
    [
        ((4, 8), (128, 128), [2048], [-1]),
        ((16, 48), (128, 128), *PACK),
        ((4, 4), (64, 128), *DEEP),
        ((2, 8), (128, 64), [1792, 384, 384], [-1, 0, 0]),
        ((8, 16), (128, 128), [1024] * 4, [-1, 0, 1, 2]),
        ((4, 8), (64, 64), *SHORT),
        ((4, 8), (64, 64), [200, 24, 24, 30], [-1, 0, 0, 0]),
        ((8, 8), (16, 16), [1531, *[24] * 49], [-1, *[0] * 49]),
        ((8, 8), (16, 16), [7] * 300, [-1] * 300),
    ],
)
def test_a_recurrence_in_plain_torch(
    heads: tuple[int, int], size: tuple[int, int], lengths: list[int], parents: list[int]
) -> None:
    """What a CPU computes, which needs several times what flash-linear-attention's kernels do."""
    sizes = {
        **{"model_type": "qwen3_5_text", "num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2},
        **{"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2},
        **{"linear_num_key_heads": heads[0], "linear_num_value_heads": heads[1]},
        **{"linear_key_head_dim": size[0], "linear_value_head_dim": size[1]},
    }
    given = ("adapter.targets=[out_proj]", "model.elementwise=torch", "slurm.gpus_per_node=0")
    config = options(sum(lengths), sizes, *given)
    live = block_bytes.count(config, lengths, parents)
    assert live.peak == pytest.approx(planned(config, lengths, parents), rel=0.05), live.largest[:20]


@pytest.mark.parametrize(("lengths", "parents"), [PACK, DEEP, SHORT, ([7] * 300, [-1] * 300), ([64], [-1])])
def test_calls_of_the_recurrence_are_those_of_the_layout(lengths: list[int], parents: list[int]) -> None:
    layout = Layout.from_tree(lengths, parents)
    shape = Shape.of(lengths, parents, 1)
    for call, group in zip(shape.calls, layout.groups(), strict=True):
        assert (call.tokens, call.segments, call.chunk) == (group.tokens, len(group.segments), group.chunk)
        assert call.rows == group.chunk * sum(group.active)
        assert call.handed == sum(group.active[:-1])
        writing = [count for step, count in enumerate(group.active, 1) if group.stored or step < len(group.active)]
        assert call.written == group.chunk * sum(writing)
        assert call.copied == group.chunk * sum(count for count in writing if count > 1)
    assert (shape.reordered == 0) == layout.in_level_order


def test_all_heads_at_once_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    config = options(8192, NARROW)
    monkeypatch.setattr(attention, "head_groups", lambda *_: 1)
    with block_bytes.kernels():
        live = block_bytes.count(config, [8192], [-1])
    assert live.peak > 1.3 * planned(config, [8192], [-1])


@pytest.mark.parametrize(("rows", "mib"), [(8192, 260), (4096, 130)])
def test_the_workspace_is_the_one_that_an_h200_was_asked_for(rows: int, mib: int) -> None:
    """64 heads of 128: what torch's allocator could not give (tests/bench/LOG.md), within the plan's pieces."""
    query = torch.empty(1, 64, rows, 128, device="meta", dtype=torch.bfloat16)
    assert block_bytes.cudnn_workspace(query) == mib * MIB
    tensors = 5 * query.nbytes
    assert layer_bytes.pieces_bytes((64, 8), 128, rows, 7 * rows, True) == tensors + mib * MIB
