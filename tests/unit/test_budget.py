"""The arithmetic of packs: the figures that the method is judged by, and how terms grow."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from configs.errors import UserError
from configs.schema import (
    AdapterConfig,
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    PackConfig,
    SlurmConfig,
    TrainConfig,
)
from prefix_train.budget import (
    GIB,
    PINNED_CHUNK,
    Budget,
    Cost,
    Shape,
    describe,
    model_flops,
    offloaded_layers,
    pinned_bytes,
    predict,
    recomputed_flops,
    summary,
    tensor_bytes,
    visible_pairs,
)
from prefix_train.geometry import Geometry
from prefix_train.kernel_choice import Kernels, Machine
from prefix_train.layer_bytes import (
    LayerBytes,
    adapter_input_bytes,
    feed_forward_bytes,
    mixer_bytes,
    mixer_gradient_bytes,
    state_bytes,
)
from tests.unit.test_geometry import MODELS, model_of

LARGE = MODELS["qwen3_5, 27B"] | {"text_config": MODELS["qwen3_5, 27B"]["text_config"] | {"vocab_size": 248_320}}
LENGTHS, PARENTS = [64_000] + [1_000] * 80, [-1] + [0] * 80
PACK = Shape.of(LENGTHS, PARENTS, rows=8_000)
ALONE = Shape.of([65_000], [-1], rows=100)
ON_A_GPU = Kernels("joined", "fla_forest", "fused", "fused")


def gib(count: int) -> float:
    return count / GIB


def test_a_hidden_state() -> None:
    one = tensor_bytes(70_000, 5_120)
    assert round(gib(one), 2) == 0.67
    assert round(gib(64 * one)) == 43


def test_a_feed_forward_tensor_and_its_dropout_mask() -> None:
    assert round(gib(tensor_bytes(70_000, 17_408)), 1) == 2.3
    assert round(gib(tensor_bytes(70_000, 17_408, itemsize=1)), 1) == 1.1


def test_logits_of_every_position() -> None:
    assert round(gib(tensor_bytes(144_000, 248_320)), 1) == 66.6


def test_positions_and_pairs_of_a_pack() -> None:
    assert 80 * ALONE.positions / PACK.positions == pytest.approx(36.1, abs=0.05)
    assert round(80 * ALONE.pairs / 1e9) == 169
    assert round(PACK.pairs / 1e9, 1) == 7.2
    assert 80 * ALONE.pairs / PACK.pairs == pytest.approx(23.4, abs=0.05)


def test_pairs_of_a_small_forest_by_hand() -> None:
    """Root 2, child 3, grandchild 1, second root 2: 3 + (6 + 6) + (1 + 5) + 3."""
    assert visible_pairs([2, 3, 1, 2], [-1, 0, 1, -1]) == 24
    assert visible_pairs([], []) == 0


def test_layer_inputs_of_a_node() -> None:
    assert gib(pinned_bytes(64, 144_000, 5_120)) == 88
    assert gib(pinned_bytes(64, 144_000, 5_120, ranks=8)) == 704
    assert pinned_bytes(1, 1, 1) == PINNED_CHUNK
    assert pinned_bytes(0, 144_000, 5_120) == 0


def test_a_state_of_the_large_model_is_3_mb() -> None:
    geometry = Geometry.of(LARGE)
    assert 4 * geometry.state_elements == 48 * 128 * 128 * 4 == 3_145_728
    assert (PACK.segments, PACK.inner, PACK.chunks) == (81, 1, 1_000 + 80 * 16)
    assert (PACK.level, PACK.level_chunks) == (80_000, 80 * 16)
    assert state_bytes(geometry, PACK) == 82 * 3_145_728
    many = Shape.of([64_000] + [32] * 2_000, [-1] + [0] * 2_000, 0)
    assert state_bytes(geometry, many) == 3_145_728 + (512 << 20)


def test_training_flops_of_the_measured_pack() -> None:
    """The prototype's count had every position in the head: 23.4 PFLOP; 80 examples alone cost 31.3 packs."""
    geometry = Geometry.of(LARGE)
    all_rows = replace(PACK, rows=PACK.positions)
    assert model_flops(geometry, all_rows, "adapter") == pytest.approx(23.4e15, rel=0.003)
    alone, packed = (model_flops(geometry, replace(s, rows=0), "adapter") for s in (ALONE, PACK))
    assert 80 * alone / packed == pytest.approx(31.3, abs=0.1)


def test_training_flops_of_a_plain_model_by_hand() -> None:
    """Three times 2 x weights x positions + 4 x heads x head size x pairs for every layer, and the head's rows."""
    geometry = Geometry.of(MODELS["llama"])
    shape = Shape.of([10], [-1], rows=3)
    weights = 4 * (32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 40)
    expected = 3 * (2 * weights * 10 + 4 * 4 * 64 * 55 + 2 * 32 * 97 * 3)
    assert model_flops(geometry, shape, "all") == expected
    assert recomputed_flops(geometry, shape) == 2 * weights * 10 + 4 * 4 * 64 * 55
    frozen = 2 * (2 * weights * 10 + 2 * 32 * 97 * 3) + 3 * 4 * 4 * 64 * 55
    assert model_flops(geometry, shape, "adapter", adapters=7) == frozen + 6 * 7 * 10


def test_flops_count_the_chosen_experts() -> None:
    geometry = Geometry.of(MODELS["qwen3_next"])
    more = Geometry.of(MODELS["qwen3_next"] | {"num_experts_per_tok": 3})
    assert more.product_flops - geometry.product_flops == 2 * 4 * 3 * 32 * 20


def test_predicted_time_follows_the_model() -> None:
    cost = Cost.by_flops(Geometry.of(LARGE), "adapter")
    assert cost.per_pair == pytest.approx(Cost().per_pair, rel=0.01)
    assert Cost.by_flops(Geometry.of(LARGE), "all").per_pair < cost.per_pair
    assert Cost(2.0, 0.5).of(10, 4) == 22


PEFT_TARGETS = {
    "llama": ["q_proj", "down_proj"],
    "qwen3": ["k_proj", "up_proj", "gate_proj"],
    "qwen3_5_text": ["o_proj", "in_proj_qkv", "in_proj_b"],
    "qwen3_next": ["v_proj", "out_proj", "in_proj_qkvz", "shared_expert_gate"],
}


@pytest.mark.parametrize("name", PEFT_TARGETS)
def test_adapter_parameters_are_those_of_peft(name: str) -> None:
    model = get_peft_model(model_of(MODELS[name]), LoraConfig(r=3, target_modules=PEFT_TARGETS[name]))
    counted = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert Geometry.of(MODELS[name]).adapter_parameters(3, PEFT_TARGETS[name]) == counted


def test_an_adapter_target_that_no_layer_has_is_named() -> None:
    with pytest.raises(UserError, match=r"adapter\.targets: no layer has in_proj_z; there are down_proj"):
        Geometry.of(MODELS["llama"]).adapter_parameters(8, ["q_proj", "in_proj_z"])


def test_tensors_of_a_layer_by_hand() -> None:
    """The large geometry, per position in bf16: attention with its gate, Gated DeltaNet, feed-forward."""
    geometry = Geometry.of(LARGE)
    one = Shape.of([64], [-1], 0)
    attention = 64 * (2 * (2 * 5120 + 5 * 6144 + 3 * 1024) + 4 * 24)
    assert mixer_bytes(geometry, "full_attention", one) == attention
    widths = 2 * 5120 + 10240 + 2 * 2048 + 4 * 6144 + 48 * 64
    assert mixer_bytes(geometry, "linear_attention", one) == 64 * (2 * widths + 8 * 48) + 3_145_728
    assert mixer_gradient_bytes(geometry, "linear_attention", one) == 64 * 2 * 8 * 6144 + 2 * 3_145_728 // 2
    pieces = 7 * 2 * 6144 + 2 * 4 * 24
    assert mixer_gradient_bytes(geometry, "full_attention", one) == 64 * pieces
    sums = 4 * (6144 + 2 * 1024)
    assert mixer_gradient_bytes(geometry, "full_attention", Shape.of([64] * 2, [-1] * 2, 0)) == 128 * (pieces + sums)
    assert feed_forward_bytes(geometry, 0, 64) == 64 * 2 * (2 * 5120 + 3 * 17408)


def test_an_adapter_with_dropout_keeps_its_input_and_a_mask() -> None:
    geometry = Geometry.of(LARGE)
    plain, dropout = (AdapterConfig(rank=8, dropout=rate, targets=["down_proj"]) for rate in (0.0, 0.05))
    assert adapter_input_bytes(geometry, 0, 70_000, plain) == 70_000 * 8 * 2
    extra = adapter_input_bytes(geometry, 0, 70_000, dropout) - 70_000 * 8 * 2
    assert extra == tensor_bytes(70_000, 17_408) + tensor_bytes(70_000, 17_408, itemsize=1)


def config(**options: Any) -> Config:
    base = Config(
        data=DataConfig(train="none.jsonl"),
        model=ModelConfig(build=LARGE),
        train=TrainConfig(updates=1),
        pack=PackConfig(max_positions=144_000, packs_per_update=16),
        memory=MemoryConfig(offload="auto"),
        slurm=SlurmConfig(nodes=2, tasks_per_node=8, gpus_per_node=8),
    )
    return replace(base, **options)


def bytes_of(budget: Budget, name: str) -> int:
    return next(term.bytes for term in budget.terms if term.name == name)


def test_terms_of_a_node_of_eight() -> None:
    budget = predict(config(), PACK)
    assert gib(budget.total("host")) == 8 * 63 * 88 / 64
    assert bytes_of(budget, "layer inputs") == 2 * tensor_bytes(144_000, 5_120)
    assert bytes_of(budget, "frozen weights") == sum(budget.geometry.parameters.values()) * 2 // 16
    assert budget.hardware_flops == budget.model_flops + recomputed_flops(budget.geometry, PACK)


def test_logits_and_a_layer_s_backward_never_meet() -> None:
    budget = predict(config(), PACK)
    by_time = {
        when: sum(term.bytes for term in budget.terms if term.place == "gpu" and term.when == when)
        for when in ("always", "loss", "layer")
    }
    assert by_time["loss"] == bytes_of(budget, "logits of a chunk")
    assert by_time["layer"] == bytes_of(budget, "one layer recomputed") + bytes_of(budget, "gradients in the layer")
    assert budget.total("gpu") == by_time["always"] + by_time["layer"]
    short = Shape.of([100], [-1], rows=8_000)
    assert predict(config(), short).total("gpu") == sum(
        term.bytes for term in predict(config(), short).terms if term.place == "gpu" and term.when != "layer"
    )


@pytest.mark.parametrize(("offload", "measured"), [("auto", 33.10), ("none", 37.5)])
def test_a_measured_update(offload: str, measured: float) -> None:
    """Peaks on an H200 of an update of four layers of this pack, GiB: tests/bench/LOG.md, commits 2c954c7, 4c89a98."""
    text = LARGE["text_config"] | {"num_hidden_layers": 4, "model_type": "qwen3_5_text"}
    adapter = AdapterConfig(dropout=0.05, targets=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"], merger=False)
    given = config(
        model=ModelConfig(build=text, attention="merged", deltanet="fla", elementwise="torch", heads="torch"),
        adapter=adapter,
        memory=MemoryConfig(offload=offload),
        cluster="debug",
    )
    budget = predict(given, replace(PACK, rows=40_000))
    assert gib(budget.total("gpu")) == pytest.approx(measured, rel=0.05)


def test_a_measured_layer_without_tiles() -> None:
    """A prototype held 57 GiB above weights and layer inputs in the backward of a recomputed layer of this pack."""
    memory = MemoryConfig(offload="auto", tile_rows=0)
    budget = predict(config(adapter=AdapterConfig(dropout=0.05), memory=memory), PACK)
    inside = ("one layer recomputed", "gradients in the layer", "residual stream")
    assert sum(gib(bytes_of(budget, name)) for name in inside) == pytest.approx(57, rel=0.05)


def test_levels_and_pieces_of_a_forest() -> None:
    """Root 5 with children 100 and 3, the latter's child 200; another root 7, alone."""
    shape = Shape.of([5, 100, 3, 200, 7], [-1, 0, 0, 2, -1], 1)
    assert (shape.level, shape.level_chunks) == (200, 4)
    assert shape.piece == 7 * 200
    star = Shape.of([1_000, 10, 10, 10], [-1, 0, 0, 0], 1)
    assert star.piece == 7 * 1_000
    assert Shape.of([1_000, *[10] * 400], [-1, *[0] * 400], 1).piece == 7 * 4_000
    assert PACK.piece == max(7 * 80_000, 3 * 80_000 + 4 * 64_000)
    read = Shape.of([100, *range(1, 41)], [-1, *[0] * 40], 1)
    assert read.piece == 3 * 820 + 4 * 100
    assert read.joined == 920 + 3 * 820 + 4 * 100, "what is read comes last"
    assert star.joined == 30 + 7 * 1_000
    assert shape.joined == 5 + 7 + 3 + 100 + 7 * 200, "short ones first"
    assert Shape.of([20, 9, 2], [-1, 0, 1], 1).joined == 2 + 9 + 7 * 20
    assert Shape.of([*range(50, 70)], [-1] * 20, 1).joined == 1_190 + 1_190, "all of them, and what they come to"
    assert Shape.of([64], [-1], 1).joined == Shape.of([64], [-1], 1).piece


def test_attention_that_is_kept() -> None:
    """Its output waits where its layer's input does: one of four layers has it, the last one's stays."""
    plain, kept, one, here = (
        predict(config(memory=MemoryConfig(offload=offload, keep_attention=keep), cluster="debug"), PACK)
        for offload, keep in (("auto", "none"), ("auto", "auto"), ("auto", "1"), ("none", "auto"))
    )
    chunked = pinned_bytes(1, 144_000, 6_144)
    assert kept.total("host") - plain.total("host") == 15 * chunked
    assert one.total("host") == plain.total("host")
    statistics = tensor_bytes(144_000, 24, itemsize=4)
    assert bytes_of(kept, "attention kept") == 16 * statistics
    assert bytes_of(here, "attention kept") == 16 * statistics + 15 * tensor_bytes(144_000, 6_144)


def test_middles_that_are_kept() -> None:
    """Each waits where its layer's input does, the last one's stays; two are there while a layer's backward runs."""
    plain, kept, few, here = (
        predict(config(memory=MemoryConfig(offload=offload, keep_middle=keep), cluster="debug"), PACK)
        for offload, keep in (("auto", "none"), ("auto", "auto"), ("40", "30"), ("none", "auto"))
    )
    one, chunked = tensor_bytes(144_000, 5_120), pinned_bytes(1, 144_000, 5_120)
    assert bytes_of(kept, "offloaded middles") == 63 * chunked == kept.total("host") - plain.total("host")
    assert bytes_of(kept, "layer inputs") == bytes_of(plain, "layer inputs") == 2 * one
    assert kept.total("gpu") == plain.total("gpu"), "the recurrence needs the most, with and without"
    assert bytes_of(few, "offloaded middles") == 6 * chunked
    assert bytes_of(few, "layer inputs") == (24 + 24) * one
    assert (bytes_of(here, "offloaded middles"), bytes_of(here, "layer inputs")) == (0, 128 * one)


@pytest.mark.parametrize("dropout", [0.0, 0.05])
def test_a_layer_that_keeps_its_middle_has_one_half_s_tensors(dropout: float) -> None:
    """Whole, the feed-forward needs the most: with the mixer's tensors beside it, or without."""
    adapter = AdapterConfig(dropout=dropout, targets=["q_proj", "in_proj_qkv", "gate_proj", "down_proj"])
    both, alone = (
        LayerBytes.of(
            config(adapter=adapter, memory=MemoryConfig(tile_rows=0, keep_middle=keep)),
            *(ON_A_GPU, Geometry.of(LARGE), 0, PACK),
        )
        for keep in ("none", "auto")
    )
    assert (both.what, alone.what) == ("the feed-forward's", "the feed-forward's")
    assert both.made == alone.made
    of_mixer = AdapterConfig(dropout=dropout, targets=["in_proj_qkv"])
    mixer = mixer_bytes(Geometry.of(LARGE), "linear_attention", PACK)
    mixer += adapter_input_bytes(Geometry.of(LARGE), 0, 144_000, of_mixer)
    assert both.kept - alone.kept == mixer + tensor_bytes(144_000, 5_120)


def test_tiles_keep_inputs_alone() -> None:
    """With tiles neither dropout nor another adapter keeps anything for the whole pack."""
    plain = predict(config(), PACK).total("gpu")
    dropout = AdapterConfig(dropout=0.05, targets=[*AdapterConfig().targets, "up_proj", "down_proj"])
    assert predict(config(adapter=dropout), PACK).total("gpu") - plain < GIB // 20
    assert predict(config(memory=MemoryConfig(offload="auto", tile_rows=0)), PACK).total("gpu") > plain + 10 * GIB


def test_the_first_rank_has_an_adapter_s_rows() -> None:
    """Sharding cuts the first dimension: of 64 ranks the first eight have one row of a lora_A of rank 8 each."""
    many = config(slurm=SlurmConfig(nodes=8, tasks_per_node=8, gpus_per_node=8))
    budget = predict(many, PACK)
    geometry = budget.geometry
    shapes = [*geometry.adapter_shapes(8, AdapterConfig().targets), *geometry.merger_shapes]
    rows = sum(-(-first // 64) * second for first, second in shapes)
    assert bytes_of(budget, "trained parameters") == 16 * rows
    total = geometry.adapter_parameters(8, AdapterConfig().targets) + geometry.parameters["merger"]
    assert rows > 1.5 * total / 64


def test_offload_moves_layer_inputs_to_the_host() -> None:
    kept = predict(config(memory=MemoryConfig(offload="none")), PACK)
    some = predict(config(memory=MemoryConfig(offload="10")), PACK)
    assert bytes_of(kept, "layer inputs") == 64 * tensor_bytes(144_000, 5_120)
    assert bytes_of(some, "layer inputs") == 54 * tensor_bytes(144_000, 5_120)
    short = predict(config(memory=MemoryConfig(offload="10")), ALONE)
    assert short.total("host") == some.total("host"), "the pool is made for pack.max_positions"
    assert kept.total("host") == 0
    assert gib(some.total("host")) == 110
    assert [offloaded_layers(text, 64) for text in ("none", "auto", "3", "99")] == [0, 63, 3, 63]


def test_without_recomputation_every_layer_keeps_its_tensors() -> None:
    once = predict(config(), PACK)
    kept = predict(config(memory=MemoryConfig(recompute=False)), PACK)
    assert bytes_of(kept, "all layers' tensors") > 60 * 0.5 * bytes_of(once, "one layer recomputed")
    assert kept.hardware_flops == kept.model_flops


def test_training_all_parameters_shards_their_masters() -> None:
    budget = predict(config(train=TrainConfig(trainable="all")), PACK)
    total = sum(budget.geometry.parameters.values())
    assert bytes_of(budget, "trained parameters") == total * 16 // 16
    assert bytes_of(budget, "frozen weights") == 0
    assert bytes_of(budget, "gradient of the head") == 248_320 * 5_120 * 4


def test_one_rank_gathers_nothing_and_logits_follow_the_rows() -> None:
    budget = predict(config(cluster="debug"), PACK)
    assert bytes_of(budget, "gathered weights") == 0
    on_cpu, on_gpu = (config(slurm=SlurmConfig(gpus_per_node=gpus), train=TrainConfig(updates=1)) for gpus in (0, 1))
    assert bytes_of(predict(on_cpu, PACK), "logits of a chunk") == 4_096 * 248_320 * 8
    assert bytes_of(predict(on_gpu, PACK), "logits of a chunk") == 4_096 * 248_320 * 2
    assert bytes_of(predict(on_gpu, replace(PACK, rows=100)), "logits of a chunk") == 100 * 248_320 * 2
    streamed = replace(on_gpu, engine="stream")
    assert bytes_of(predict(streamed, PACK), "logits of a chunk") == 4_096 * 248_320 * 8
    in_tiles = replace(on_gpu, train=TrainConfig(loss_chunk_words=8_192))
    assert bytes_of(predict(in_tiles, PACK), "logits of a chunk") == 4_096 * 8_192 * 8


def test_attention_that_is_joined_has_all_pieces_gradients_at_once() -> None:
    plain = replace(config(), model=replace(config().model, attention="merged"))
    geometry = predict(plain, PACK).geometry
    merged, joined = (mixer_gradient_bytes(geometry, "full_attention", PACK, joined=one) for one in (False, True))
    assert joined >= merged + PACK.positions * geometry.query_width * 2


def test_a_budget_is_that_of_the_kernels_that_run() -> None:
    """With what is chosen where nothing is said, as with the same by name; on another chip other terms."""
    best = Kernels("joined", "fla_forest", "fused", "fused")
    found = predict(config(), PACK)
    assert found.kernels == best
    assert f"kernels on a GPU of compute capability 9.0, assumed: {best}" in describe(found)
    assert summary(found)["kernels"] == best._asdict()
    by_name = predict(replace(config(), model=replace(config().model, **best._asdict())), PACK)
    assert by_name.terms == found.terms
    before = predict(config(), PACK, Machine("cuda", (8, 0)))
    assert before.kernels == Kernels("merged", "fla", "liger", "torch")
    assert f"kernels on a GPU of compute capability 8.0: {before.kernels}" in describe(before)


def test_attention_that_is_not_in_pieces_is_not_kept() -> None:
    kept = config(memory=MemoryConfig(keep_attention="auto"))
    assert bytes_of(predict(kept, PACK), "attention kept") > 0
    for kernels in ("flex", "dense"):
        other = replace(kept, model=replace(kept.model, attention=kernels))
        assert bytes_of(predict(other, PACK), "attention kept") == 0


def test_without_a_plan_the_budget_is_that_of_the_longest_example() -> None:
    assert predict(config()).shape == Shape.of([144_000], [-1], 144_000)


def test_too_little_memory_is_refused_with_the_largest_terms() -> None:
    budget = predict(config(), PACK)
    budget.refuse(gpu_bytes=budget.total("gpu"), host_bytes=693 * GIB)
    with pytest.raises(UserError, match=r"needs 693\.0 GiB of a node's pinned memory, which has 512\.0: largest .*off"):
        budget.refuse(host_bytes=512 * GIB)
    with pytest.raises(
        UserError, match=r"of a GPU, which has 8\.0: largest terms one layer recomputed .*, gradients in"
    ):
        budget.refuse(gpu_bytes=8 * GIB)


def test_a_budget_is_printed_and_is_json() -> None:
    budget = predict(config(), PACK)
    text = describe(budget)
    assert "144,000 positions: 81 segments, 7.21e+09 visible pairs" in text
    assert "693.000 GiB pinned on each node" in text
    assert all(term.name in text for term in budget.terms)
    assert json.loads(json.dumps(summary(budget)))["host_bytes_per_node"] == 693 * GIB


def test_what_is_small_is_printed_in_mib_and_one_of_a_kind_in_the_singular() -> None:
    small = config(model=ModelConfig(build=MODELS["llama"]), memory=MemoryConfig(offload="none"))
    budget = predict(small, Shape.of([8], [-1], 1))
    assert 0 < budget.total("gpu") < GIB
    text = describe(budget, "rank")
    assert "a pack of 8 positions: 1 segment, 36 visible pairs, 1 prediction row\n" in text
    assert f"{budget.total('gpu') / 2**20:10.3f} MiB at most on each rank\n" in text
    assert "     0.000 GiB pinned on each node\n" in text


@pytest.mark.parametrize("name", [name for name in MODELS if "defaults" not in name])
def test_every_family_has_a_budget(name: str) -> None:
    gate = ["gate_proj"] if MODELS[name]["model_type"] not in ("mixtral", "qwen3_moe") else []
    targets = AdapterConfig(targets=["q_proj", *gate], dropout=0.1)
    budget = predict(config(model=ModelConfig(build=MODELS[name]), adapter=targets), Shape.of([8, 2], [-1, 0], 2))
    assert budget.total("gpu") > 0
    assert budget.model_flops > 0
