"""Which blocks are read when, counted beforehand; a run's memory as a plan: what stays, what fits, what to change."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from configs import compose
from configs.errors import UserError
from configs.schema import Config
from prefix_train.budget import GIB
from prefix_train.geometry import Geometry
from prefix_train.shape import Shape
from prefix_train.stream import origin, planner, schedule
from prefix_train.stream.schedule import Schedule

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "stream-32b-6gb.yaml"
MODEL = {
    "model_type": "qwen3",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 152064,
}


def recipe(*overrides: str) -> Config:
    """The recipe, with a model that is known without files."""
    return compose.load(RECIPE, ["model.path=null", f"model.build={json.dumps(MODEL)}", *overrides])


# The schedule.


@pytest.mark.parametrize("blocks", [4, 7, 64])
@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("resident", [0, 1, 3])
def test_reads_are_two_for_each_block_less_what_is_still_there(blocks: int, slots: int, resident: int) -> None:
    """Each way begins with the slots' contents, and residents are never read."""
    first, *later = schedule.reads(blocks, 0, slots, resident, 4)
    passing = blocks - resident
    held = min(slots, passing)
    assert later == [2 * (passing - held)] * 3
    assert first == held + 2 * (passing - held)


def test_nothing_is_read_below_the_lowest_adapter() -> None:
    all_the_way, half = (sum(schedule.reads(64, lowest, 3, 0, 5)) for lowest in (0, 32))
    assert all_the_way - half >= 5 * 29


def test_evaluation_goes_up_alone() -> None:
    assert schedule.walk(3, None) == [0, 1, 2]
    assert schedule.walk(3, 1) == [0, 1, 2, 2, 1]
    assert schedule.reads(64, None, 3, 0, 3)[1:] == [64, 64]


def test_a_slot_is_never_given_away_while_its_block_is_visited() -> None:
    made = Schedule(2)
    order = schedule.walk(6, 0)
    made.begin(order, schedule.walk(6, None))
    for unit in order:
        slot = made.enter(unit)
        assert slot is not None
        assert made.held[slot] == unit
        assert all(load.unit != unit for load in made.leave()) or order.count(unit) > 1


def test_visits_out_of_order_are_errors() -> None:
    made = Schedule(2)
    made.begin([0, 1])
    with pytest.raises(RuntimeError, match="unit 1 is visited out of order"):
        made.enter(1)
    made.enter(0)
    with pytest.raises(RuntimeError, match="still visited"):
        made.begin([0])


# The plan.


def test_the_recipe_fits_six_gib() -> None:
    plan = planner.make(recipe())
    assert plan.fits
    assert plan.limit == 6 * GIB
    assert 0 < plan.resident < 64
    assert not replace(plan, resident=plan.resident + 1).fits
    assert 480e6 * 0.5625 < plan.files.blocks[0] < 490e6 * 0.5625
    shown = plan.describe()
    for term in ("slots", "resident blocks", "tiles of the head", "dequantised matrix", "offloaded layer inputs"):
        assert term in shown


@pytest.mark.parametrize("positions", [128, 512, 1024, 2048, 4096, 8192])
def test_the_curve_fits_and_short_packs_leave_room_for_more_blocks(positions: int) -> None:
    plan = planner.make(recipe(f"pack.max_positions={positions}"))
    assert plan.fits
    assert plan.resident >= planner.make(recipe()).resident


def test_residents_are_fixed_by_the_plan_and_less_is_read() -> None:
    none, some = (planner.make(recipe(f"stream.resident_blocks={count}")) for count in (0, 5))
    assert some.needed - none.needed == sum(none.files.blocks[-5:])
    assert none.reads() - some.reads() == 10 * none.files.blocks[0]


def test_a_tenth_less_than_the_plan_is_refused_with_what_would_fit() -> None:
    config = recipe("stream.resident_blocks=0")
    needed = planner.make(config).needed
    config = compose.with_changes(config, [f"stream.budget_gib={0.9 * needed / GIB}"])
    plan = planner.make(config)
    with pytest.raises(UserError, match="is too small: packs of up to 8,192 positions need") as found:
        plan.refuse()
    assert "\n" not in str(found.value)
    assert "TOO SMALL" in plan.describe()
    advice = plan.would_fit()
    assert advice
    for line in advice:
        assert line.partition(" (")[0] in str(found.value)
        assert planner.make(compose.with_changes(config, line.split())).fits, line


SMALL = {
    **{"model_type": "qwen3", "num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 2048},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 32000},
}
SMALL_HYBRID = {
    **SMALL,
    **{"model_type": "qwen3_5_text", "linear_num_key_heads": 4, "linear_num_value_heads": 8},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64},
}
PACKS = [
    ([3000], [-1], 1500),
    ([2000, *[32] * 60], [-1, *[0] * 60], 900),
    ([1500, 500, 200, 200, 600], [-1, 0, 1, 1, 0], 40),
    ([300, 300, 300], [-1, -1, -1], 900),
]
OPTIONS = [
    [],
    ["memory.offload=none", "stream.resident_blocks=2"],
    ["train.loss_chunk_words=0", "train.loss_chunk_rows=4096"],
    ["pack.packs_per_update=3", "stream.packs_per_visit=3", "stream.slots=4"],
    ["memory.tile_rows=0", "adapter.dropout=0.1"],
    ["stream.graphs=on", "adapter.masks=counted", "adapter.dropout=0.1", "stream.resident_blocks=6"],
    ["slurm.gpus_per_node=0", "model.deltanet=auto"],
]


@pytest.mark.parametrize("pack", PACKS, ids=["one", "short", "deep", "roots"])
@pytest.mark.parametrize("sizes", [SMALL, SMALL_HYBRID], ids=["plain", "hybrid"])
def test_whatever_a_refusal_suggests_is_accepted(sizes: dict[str, Any], pack: Any) -> None:
    """One suggestion at a time, as it would be written behind the command."""
    lengths, parents, rows = pack
    shape, refused = Shape.of(lengths, parents, rows), 0
    sizes_are = (f"model.build={json.dumps(sizes)}", f"pack.max_positions={sum(lengths)}", "pack.min_shared=1")
    for options in OPTIONS:
        config = recipe(*sizes_are, *options)
        least = planner.make(compose.with_changes(config, ["stream.budget_gib=0.01"]), shape)
        fixed = sum(
            term.bytes for term in least.budget.terms if term.name in ("CUDA context", "workspaces", "fragments")
        )
        for share in (0.9, 0.3):
            limit = (fixed + share * (least.needed - fixed)) / GIB
            small = compose.with_changes(config, [f"stream.budget_gib={limit}"])
            plan = planner.make(small, shape)
            with pytest.raises(UserError, match="is too small") as found:
                plan.refuse()
            refused += 1
            for line in plan.would_fit():
                assert line in str(found.value)
                changed = planner.make(compose.with_changes(small, line.split()), shape)
                assert changed.fits, (options, share, line)
                changed.refuse()
    assert refused == 2 * len(OPTIONS)


def test_advice_names_the_host_where_inputs_lie_on_the_device() -> None:
    config = recipe("memory.offload=none", "stream.resident_blocks=0")
    plan = planner.make(config)
    assert not plan.fits
    assert "memory.offload=auto" in plan.would_fit()


def test_a_budget_that_no_pack_fits_says_so() -> None:
    plan = planner.make(recipe("stream.budget_gib=0.5"))
    assert plan.would_fit() == []
    with pytest.raises(UserError, match="nothing with this model"):
        plan.refuse()


def test_packs_together_keep_their_inputs_together() -> None:
    one, four = (
        planner.make(recipe("pack.packs_per_update=4", f"stream.packs_per_visit={count}", "stream.resident_blocks=0"))
        for count in (1, 4)
    )
    hosts = [plan.budget.total("host") for plan in (one, four)]
    assert hosts[1] == 4 * hosts[0]
    assert four.needed > one.needed


def test_sizes_of_a_store_that_is_there_are_its_own(tmp_path: Path) -> None:
    listed: list[dict[str, Any]] = [{"name": "embedding", "nbytes": 1000, "tensors": []}]
    listed += [
        {"name": f"block.{index}", "nbytes": 500 + index, "tensors": [{"weights": "nf4", "shape": [3, 40]}]}
        for index in range(64)
    ]
    listed += [{"name": "final_norm", "nbytes": 77, "tensors": []}]
    path = tmp_path / origin.MANIFEST
    path.write_text(json.dumps({"format": origin.FORMAT, "blocks": listed}))
    config = recipe(f"stream.store={tmp_path}")
    files = planner.Files.of(config, Geometry.of(MODEL))
    assert files == planner.Files(tuple(range(500, 564)), 1000, 77, 120, str(tmp_path))
    path.write_text(json.dumps({"format": origin.FORMAT}))
    with pytest.raises(UserError, match="cannot be read as a store's manifest"):
        planner.make(config)
    path.write_text(json.dumps({"format": origin.FORMAT + 1, "blocks": listed}))
    with pytest.raises(UserError, match=r"manifest.json: format 2, and 1 is expected .one of a newer version: update"):
        planner.make(config)


def test_a_pack_of_the_plan_is_grown_to_the_largest_that_may_come() -> None:
    shape = Shape.of([100, 50, 50], [-1, 0, 0], 100)
    plan = planner.make(recipe("pack.max_positions=4000"), shape)
    assert (plan.shape.positions, plan.shape.rows) == (4000, 2000)


# Options that do not fit together.


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["stream.store=null"], "engine=stream needs stream.store"),
        (["stream.budget_gib=null"], "engine=stream needs stream.budget_gib"),
        (["engine=sharded"], "stream.store=stores/qwen3-32b with engine=sharded: leave it out, or set engine=stream"),
        (["stream.slots=1"], "stream.slots is 1: give 2 or more"),
        (["stream.slots=5"], "stream.slots is 5: give 4 or less"),
        (["stream.slot=2"], "did you mean stream.slots"),
        (["stream.resident_blocks=some"], "give auto or a number of blocks"),
        (["stream.packs_per_visit=2"], "give no more than there are"),
        (["train.trainable=all"], "only adapters can be trained"),
        (["memory.recompute=false", "memory.offload=none"], "a block is gone before its backward"),
        (["memory.keep_attention=auto"], "memory.keep_attention with engine=stream: a block keeps nothing but its in"),
        (["memory.keep_middle=auto"], "memory.keep_middle with engine=stream: a block keeps nothing but its input"),
        (["stream.graphs=on", "adapter.dropout=0.1"], "set adapter.masks=counted or stream.graphs=auto"),
        (["stream.graphs=on", "slurm.gpus_per_node=0"], "stream.graphs=on needs a GPU: give slurm.gpus_per_node, or"),
        (["train.loss_chunk_words=100"], "give a multiple of 64"),
        (["slurm.tasks_per_node=2", "slurm.gpus_per_node=2", "pack.packs_per_update=2"], "trains on one GPU"),
        (["data.heldout=x.jsonl", "evaluate.generate=true"], "answers need the whole model"),
        (["data.heldout=x.jsonl", "verify.examples=1"], "use `prefix-train verify`"),
    ],
)
def test_contradictions_are_named(overrides: list[str], says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        recipe(*overrides)


def test_launches_are_recorded_where_masks_are_counted_and_where_they_need_not_be() -> None:
    counted = recipe("stream.graphs=on", "adapter.dropout=0.1", "adapter.masks=counted")
    assert counted.stream.graphs == "on"
    assert recipe("stream.graphs=auto", "adapter.dropout=0.1", "slurm.gpus_per_node=0").stream.graphs == "auto"


# Recorded launches.


def test_recorded_launches_have_memory_of_their_own() -> None:
    off, on = (planner.make(recipe(f"stream.graphs={how}", "stream.resident_blocks=2")) for how in ("off", "on"))
    mine = {term.name: term.bytes for term in on.budget.terms}
    assert mine["fixed hidden states"] == 3 * 8192 * 5120 * 2
    assert mine["recordings"] == 2 * (3 + 2) * 4 * planner.RECORDING
    assert mine["pool of the recordings"] > mine["one layer recomputed"] + mine["gradients in the layer"]
    assert on.beside - off.beside == mine["recordings"]
    assert on.needed - off.needed == sum(
        mine[name] for name in ("fixed hidden states", "recordings", "pool of the recordings")
    )


def test_without_recordings_nothing_is_planned_for_them() -> None:
    off, dropping = (planner.make(recipe(*changes)) for changes in ([], ["stream.graphs=auto", "adapter.dropout=0.1"]))
    assert dropping.beside == off.beside == planner.CONTEXT
    assert {term.name for term in dropping.budget.terms} == {term.name for term in off.budget.terms}


def test_advice_is_to_do_without_recordings() -> None:
    config = recipe("stream.resident_blocks=0")
    limit = 1.001 * planner.make(config).needed / GIB
    plan = planner.make(compose.with_changes(config, [f"stream.budget_gib={limit}", "stream.graphs=on"]))
    assert not plan.fits
    assert "stream.graphs=off" in plan.would_fit()
