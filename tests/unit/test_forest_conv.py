"""Tables of the convolution over a forest against what the root path of each token says."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_train import forest_conv
from prefix_train.forest_conv import ROWS, WIDEST
from prefix_train.layout import Layout
from tests.unit.test_layout import forests, paths

MOST = WIDEST - 1


@settings(max_examples=60, deadline=None)
@given(forests(), st.integers(1, WIDEST))
def test_tables(tree: tuple[list[int], list[int]], width: int) -> None:
    layout = Layout.from_tree(*tree, width=width)
    tiles, runs, origin, slots = forest_conv.make_tables(layout)
    assert all(table.dtype == np.int32 for table in (tiles, runs, origin))
    own, segments, warm_up = paths(layout), layout.segment_of.tolist(), width - 1
    assert [row for first, count, *_ in tiles.tolist() for row in range(first, first + count)] == list(range(len(own)))
    due: dict[int, int] = {}  # slot -> the row that is due what it holds
    for entry in tiles.tolist():
        first, count, end, tail = entry[:4]
        history, before, mine = (entry[4 + MOST * part : 4 + MOST * (part + 1)] for part in range(3))
        assert count <= ROWS
        assert {segments[row] for row in (first, first + count - 1, end - 1)} == {segments[first]}
        assert end == len(segments) or segments[end] != segments[first]
        path = own[first][:-1][::-1][:warm_up]
        assert history == path + [-1] * (MOST - len(path))
        begins = first == layout.starts[segments[first]]
        assert [slot >= 0 for slot in before] == [begins and row >= 0 for row in history]
        due |= {slot: row for slot, row in zip(before, history, strict=True) if slot >= 0}
        assert [slot >= 0 for slot in mine] == [tail + step < end for step in range(MOST)]
        due |= {slot: tail + step for step, slot in enumerate(mine) if slot >= 0}
    assert sorted(due) == list(range(slots))
    of_runs = [int(row) for row, length in zip(origin, np.diff(runs), strict=True) for _ in range(length)]
    assert [due[slot] for slot in range(slots)] == of_runs
    assert sorted(set(of_runs)) == origin.tolist()
    assert runs[0] == 0
    assert set(origin.tolist()) == set(layout.history.origin.tolist())


def test_readers_in_their_order() -> None:
    """A row's own segment first, then its readers as they lie in the buffer; a second time nothing is made."""
    layout = Layout.from_tree([2, 1, 5, 1], [-1, 0, 1, 0])
    tiles, runs, origin, slots = forest_conv.make_tables(layout)
    assert origin.tolist() == [0, 1, 2]
    assert runs.tolist() == [0, 4, 8, 10] == [*runs[:-1].tolist(), slots]
    assert tiles[:, 7:10].tolist() == [[-1, -1, -1], [5, 1, -1], [9, 6, 2], [7, 3, -1]]
    assert tiles[:, 10:].tolist() == [[0, 4, -1], [8, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    assert forest_conv.tables(layout) is forest_conv.tables(layout)
