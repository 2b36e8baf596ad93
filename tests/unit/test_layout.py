"""Every table of a layout against what the root path of each token says."""

from __future__ import annotations

import pickle
import time
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from prefix_train.attention import tree_attention
from prefix_train.deltanet import tree_conv, tree_delta_rule
from prefix_train.groups import CHUNK
from prefix_train.layout import Layout
from tests import trees

LENGTHS = st.sampled_from((1, 2, 3, 4, 5, 63, 64, 65, 129))


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Depth 1 to 5, up to 12 segments, in depth-first order."""
    depths: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(1, 12))):
        depth = draw(st.integers(0, min(4, depths[-1] + 1))) if depths else 0
        parents.append(max((i for i, d in enumerate(depths) if d == depth - 1), default=-1))
        depths.append(depth)
    return draw(st.lists(LENGTHS, min_size=len(parents), max_size=len(parents))), parents


def paths(layout: Layout) -> list[list[int]]:
    """For each token, the buffer rows of its root path up to itself."""
    found: list[list[int]] = []
    for segment, start in enumerate(layout.starts):
        rows = trees.path_rows(layout, segment).tolist()
        before = len(rows) - layout.lengths[segment]
        found += [rows[: before + i + 1] for i in range(layout.lengths[segment])]
        assert len(found) == start + layout.lengths[segment]
    return found


@settings(max_examples=60, deadline=None)
@given(forests())
def test_token_tables(tree: tuple[list[int], list[int]]) -> None:
    layout = Layout.from_tree(*tree)
    own = paths(layout)
    assert layout.total == sum(tree[0]) == len(own)
    assert layout.positions.tolist() == [len(path) - 1 for path in own]
    assert layout.position_ids().shape == (1, layout.total)
    assert layout.segment_of.tolist() == [s for s, length in enumerate(tree[0]) for _ in range(length)]
    seen = torch.zeros(layout.total, layout.total, dtype=torch.bool)
    for row, path in enumerate(own):
        seen[row, path] = True
    assert torch.equal(layout.visible(), seen)
    for token, until in enumerate(layout.visible_until.tolist()):
        assert seen[:, token].nonzero().flatten().tolist() == list(range(token, until))


@settings(max_examples=60, deadline=None)
@given(forests())
def test_pieces_of_attention_cover_every_visible_pair_once(tree: tuple[list[int], list[int]]) -> None:
    layout = Layout.from_tree(*tree)
    covered = torch.zeros(layout.total, layout.total, dtype=torch.int64)
    for block in layout.blocks:
        size = block.count * block.length
        rows = block.rows if block.start is None else torch.arange(block.start, block.start + size)
        assert block.rows.numel() == (size if block.start is None else 0)
        for part in rows.view(block.count, block.length):
            covered[part[:, None], part] += torch.ones(block.length, block.length, dtype=torch.int64).tril()
    for node in layout.rectangles:
        assert node.row_start < node.row_end
        assert node.col_start < node.col_end
        covered[node.row_start : node.row_end, node.col_start : node.col_end] += 1
    assert torch.equal(covered, layout.visible().long())
    assert len({block.length for block in layout.blocks}) == len(layout.blocks)


@settings(max_examples=60, deadline=None)
@given(forests(), st.integers(1, 6))
def test_history(tree: tuple[list[int], list[int]], width: int) -> None:
    layout = Layout.from_tree(*tree, width=width)
    history = layout.history
    buffer = torch.full((history.rows,), -1)
    buffer[history.kept] = torch.arange(layout.total)
    assert (buffer[history.copy_to] == -1).all()
    assert torch.nonzero(buffer == -1)[:, 0].tolist() == history.added.tolist()
    buffer[history.copy_to] = history.copy_from
    gathered = history.source.clone()
    gathered[history.blank] = -1
    assert torch.equal(gathered, buffer)
    for token, path in enumerate(paths(layout)):
        row = int(history.kept[token])
        assert buffer[row - width + 1 : row + 1].tolist() == ([-1] * width + path)[-width:]
    copies = Counter(history.copy_from.tolist())
    assert dict(zip(history.origin.tolist(), history.copies.tolist(), strict=True)) == copies
    assert history.copy_from.tolist() == sorted(history.copy_from.tolist())
    assert history.origin.tolist() == sorted(history.origin.tolist())


@settings(max_examples=60, deadline=None)
@given(forests(), st.integers(1, 5))
def test_groups(tree: tuple[list[int], list[int]], most: int) -> None:
    layout = Layout.from_tree(*tree, group=most)
    stored: list[int] = []
    order: list[int] = []
    for depth, level in enumerate(layout.levels):
        segments = [s for group in level for s in group.segments]
        assert segments == [s for s, d in enumerate(layout.depths) if d == depth]
        above, stored = stored, []
        for group in level:
            assert len(group.segments) <= most
            assert group.lengths == tuple(layout.lengths[s] for s in group.segments)
            assert group.tokens == sum(group.lengths)
            assert group.cu_seqlens.tolist() == [0, *(stop for _, stop in trees.ranges(group.lengths))]
            assert group.cu_seqlens_cpu.tolist() == group.cu_seqlens.tolist()
            chunks = [[i, c] for i, length in enumerate(group.lengths) for c in range(-(-length // CHUNK))]
            assert group.chunk_indices.tolist() == chunks
            assert [above[slot] for slot in group.parent_slot] == [layout.parents[s] for s in group.segments if depth]
            assert group.children.tolist() == [[layout.parents[s] for s in group.segments].count(p) for p in above]
            kept = [group.segments[i] for i in group.keep]
            assert kept == [s for s in group.segments if s in layout.parents]
            assert group.stored == len(kept)
            stored += kept
            for s in group.segments:
                order += range(layout.starts[s], layout.starts[s] + layout.lengths[s])
    assert layout.in_level_order == (order == list(range(layout.total)))
    if not layout.in_level_order:
        assert layout.level_order.tolist() == order
        assert layout.level_order[layout.level_inverse].tolist() == list(range(layout.total))


@settings(max_examples=60, deadline=None)
@given(forests(), st.integers(1, 5))
def test_padded_groups(tree: tuple[list[int], list[int]], most: int) -> None:
    for group in Layout.from_tree(*tree, group=most).groups():
        assert group.chunk == min(CHUNK, max(group.lengths))
        chunks = torch.full((sum(group.active), group.chunk), -1)
        chunks.view(-1)[group.slots] = torch.arange(group.tokens)
        ranges = trees.ranges(group.lengths)
        by_length = group.by_length.tolist()
        assert sorted(by_length) == list(range(len(group.segments)))
        row = 0
        for step, active in enumerate(group.active):
            going_on = [i for i in by_length if group.lengths[i] > step * group.chunk]
            assert by_length[:active] == going_on
            for i in going_on:
                tokens = list(range(*ranges[i]))[step * group.chunk :][: group.chunk]
                assert chunks[row].tolist() == tokens + [-1] * (group.chunk - len(tokens))
                row += 1
        assert [by_length[place] for place in group.keep_by_length] == group.keep.tolist()


@pytest.mark.parametrize(
    ("lengths", "parents", "says"),
    [
        ([], [], "at least one segment"),
        ([3, 2], [-1], "2 lengths, but 1 parents"),
        ([3, 0], [-1, 0], "segment 1 has length 0"),
        ([3, 2], [0, -1], "segment 0 has parent 0: not in depth-first order"),
        ([3, 2, 1, 1], [-1, 0, -1, 0], "segment 3 has parent 0: not in depth-first order"),
        ([3, 2, 1, 1], [-1, 0, 0, 1], "segment 3 has parent 1: not in depth-first order"),
        ([3, 2], [-1, 2], "segment 1 has parent 2"),
        ([3, 2], [-1, -2], "segment 1 has parent -2"),
    ],
)
def test_bad_forests_are_refused(lengths: list[int], parents: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Layout.from_tree(lengths, parents)
    with pytest.raises(ValueError, match="width is 0"):
        Layout.from_tree([1], [-1], width=0)
    assert Layout.from_tree(np.array([2, 1]), torch.tensor([-1, 0])).lengths == (2, 1)  # type: ignore[arg-type]
    for bad in ([2.7], ["2"], np.array([2.0])):
        with pytest.raises(TypeError):
            Layout.from_tree(bad, [-1])  # type: ignore[arg-type]


class Transfers(TorchDispatchMode):
    """Counts the tensors that arrive on another device."""

    count = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        out = func(*args, **(kwargs or {}))  # type: ignore[operator]
        if isinstance(out, Tensor) and args and isinstance(args[0], Tensor) and out.device != args[0].device:
            self.count += 1
        return out


def tables(layout: Layout) -> list[Tensor]:
    return [getattr(part, name) for part in layout._parts() for name in part.TABLES]


def test_all_tables_move_in_one_transfer() -> None:
    layout = Layout.from_tree(*trees.FIVE_DEEP)
    with Transfers() as transfers:
        moved = layout.to("meta")
    assert transfers.count == 1
    assert len(tables(layout)) > 30
    assert all(table.device.type == "meta" for table in tables(moved))
    assert [table.shape for table in tables(moved)] == [table.shape for table in tables(layout)]
    assert all(group.cu_seqlens_cpu.device.type == "cpu" for group in moved.groups())
    assert {table.storage_offset() % 2 for table in tables(moved)} == {0}  # in int64: 16 bytes
    assert moved.device.type == "meta"
    assert layout.device.type == "cpu"
    assert layout.to("cpu") is layout
    assert (moved.lengths, moved.parents, moved.total) == (layout.lengths, layout.parents, layout.total)


def test_moving_keeps_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.from_tree(*trees.FIVE_DEEP)
    monkeypatch.setattr(Layout, "device", property(lambda self: torch.device("meta")))
    moved = layout.to("cpu")
    assert moved is not layout
    assert all(torch.equal(a, b) for a, b in zip(tables(moved), tables(layout), strict=True))
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(tables(moved), tables(layout), strict=True) if a.numel())


def test_tables_are_on_the_host_whatever_the_default_device() -> None:
    expected = Layout.from_tree(*trees.FIVE_DEEP)
    with torch.device("meta"):
        layout = Layout.from_tree(*trees.FIVE_DEEP)
    assert all(torch.equal(a, b) for a, b in zip(tables(layout), tables(expected), strict=True))


def test_pickles() -> None:
    layout = Layout.from_tree(*trees.FIVE_DEEP)
    builds = Layout.builds
    copy = pickle.loads(pickle.dumps(layout))  # noqa: S301
    assert all(torch.equal(a, b) for a, b in zip(tables(copy), tables(layout), strict=True))
    assert copy.starts == layout.starts
    assert Layout.builds == builds


@pytest.mark.parametrize(("prefix", "count", "length"), [(500, 2000, 32), (64000, 80, 1000)])
def test_building_is_fast(prefix: int, count: int, length: int) -> None:
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        Layout.from_tree([prefix, *[length] * count], [-1, *[0] * count])
        best = min(best, time.process_time() - start)
    assert best < 0.1


def builds_of_a_pass(layer: object, layout: Layout, layers: int = 3) -> int:
    """Layouts built by a forward with recomputation in backward."""
    x = torch.randn(layout.total, 24, requires_grad=True)
    before = Layout.builds
    hidden = x
    for _ in range(layers):
        hidden = torch.utils.checkpoint.checkpoint(layer, hidden, layout, use_reentrant=False)  # type: ignore[attr-defined]
    hidden.sum().backward()
    return Layout.builds - before


def mixing_layer(x: Tensor, layout: Layout) -> Tensor:
    """Convolution, delta rule and attention, one after the other, on [T, 24]."""
    mixed = tree_conv(x, torch.ones(24, 4), None, layout)
    heads = mixed.view(1, -1, 3, 8)
    decay = -torch.ones(heads.shape[:3])
    mixed = tree_delta_rule(heads, heads, heads, decay, -decay / 2, layout)
    heads = mixed.transpose(1, 2)
    return tree_attention(heads, heads, heads, layout, 0.3).reshape(x.shape)


def test_r18_one_build_per_pack() -> None:
    before = Layout.builds
    layout = Layout.from_tree(*trees.FIVE_DEEP)
    layout.to("meta")
    assert builds_of_a_pass(mixing_layer, layout) == 0
    assert Layout.builds - before == 1


def test_r18_fails_without_fix() -> None:
    def rebuilding(x: Tensor, layout: Layout) -> Tensor:
        return mixing_layer(x, Layout.from_tree(layout.lengths, layout.parents))

    layers = 3
    assert builds_of_a_pass(rebuilding, Layout.from_tree(*trees.FIVE_DEEP), layers) == 2 * layers
