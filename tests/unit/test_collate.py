"""Collating: the buffer and its table of targets against each example alone, over random trees and real plans."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from configs.schema import PackConfig
from prefix_train import collate as collate_module
from prefix_train.collate import Batch, EntryWeights, collate, entry_weights
from prefix_train.data import load_examples
from prefix_train.images import ImageRef
from prefix_train.layout import Layout
from prefix_train.packing import EMPTY, Pack, standalone
from prefix_train.plan import plan_epoch
from prefix_train.render import Example, PositionIndex
from prefix_train.tree import build_forest
from tests import chats
from tests.chats import picture, row, text

GRIDS = [(1, 2, 2), (1, 4, 2), (1, 2, 6), (1, 8, 4)]
"""Of the made-up images, by their number."""


class Pixels:
    """Stands in for the store: image number n is a block of n; counts what is loaded."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def load(self, path: Path, digest: str) -> NDArray[np.float32]:
        self.loaded.append(digest)
        number = int(digest, 16)
        return np.full((np.prod(GRIDS[number]), 6), number, np.float32)


@dataclass
class Piece:
    """Tokens of one segment with images as (start in the segment, number)."""

    ids: list[int]
    images: list[tuple[int, int]]


def image_token() -> int:
    return int(chats.config().image_token_id)


def random_piece(draw: random.Random, with_image: bool) -> Piece:
    ids = [draw.randrange(4) for _ in range(draw.choice([1, 1, 2, 3, 7]))]
    if not with_image:
        return Piece(ids, [])
    number = draw.randrange(len(GRIDS))
    at = draw.randint(1, len(ids))
    length = int(np.prod(GRIDS[number])) // 4
    return Piece([*ids[:at], *[image_token()] * length, 5, *ids[at:]], [(at, number)])


def example_of(path: list[Piece], targets: int, name: str, store: Any, images: bool) -> Example:
    """The example that the pieces make, its last `targets` tokens its target."""
    ids, keys, refs = np.array([token for piece in path for token in piece.ids]), None, []
    keys = ids.copy()
    begin = 0
    for piece in path:
        for at, number in piece.images:
            length = int(np.prod(GRIDS[number])) // 4
            refs.append(ImageRef(begin + at, length, GRIDS[number], f"{number:x}", Path(f"{number}.png"), store))
            keys[begin + at : begin + at + length] = -(1 + number)
        begin += len(piece.ids)
    index = PositionIndex(chats.config() if images else chats.text_config())
    target = np.zeros(len(ids), dtype=np.bool_)
    target[len(ids) - targets :] = True
    positions = index(ids, [ref.grid for ref in refs])
    return Example(name, name, ids, keys, positions, target, tuple(refs), "", len(ids) - targets)


@dataclass
class Forest:
    """A random pack and its examples."""

    pack: Pack
    examples: list[Example]
    store: Pixels


def random_forest(seed: int, images: bool = True) -> Forest:
    """Segments of few different tokens, up to 4 deep; examples end in any of them, some twice."""
    draw = random.Random(seed)
    pieces: list[Piece] = []
    parents: list[int] = []
    stack = [(-1, 1)] * draw.randint(1, 2)
    while stack:
        parent, depth = stack.pop()
        me = len(pieces)
        pieces.append(random_piece(draw, images and draw.random() < 0.3))
        parents.append(parent)
        stack += [(me, depth + 1)] * (draw.randint(2 if depth == 1 else 0, 3) if depth < 4 else 0)
    paths = []
    for end in range(len(pieces)):
        path = [end]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        length = sum(len(pieces[segment].ids) for segment in path)
        times = draw.choice([1, 1, 2]) if end not in parents else draw.choice([0, 0, 1])
        paths += [tuple(path)] * (times if length > 1 else 0)
    store = Pixels()
    examples = []
    for number, path in enumerate(paths):
        own = [pieces[segment] for segment in path]
        tokens = [token for piece in own for token in piece.ids]
        after = len(tokens) - max((i for i, token in enumerate(tokens) if token == image_token()), default=0) - 1
        examples.append(example_of(own, draw.randint(1, max(1, after)), f"e{number}", store, images))
    keep = [segment for segment in range(len(pieces)) if any(segment in path for path in paths)]
    place = {segment: index for index, segment in enumerate(keep)}
    order = draw.sample(range(len(examples)), len(examples))
    paths = [tuple(place[segment] for segment in path) for path in paths]
    origin = []
    for segment in keep:
        owner = draw.choice([e for e in order if place[segment] in paths[e]])
        before = paths[owner][: paths[owner].index(place[segment])]
        origin.append((owner, sum(len(pieces[keep[index]].ids) for index in before)))
    lengths = tuple(len(pieces[segment].ids) for segment in keep)
    logical = sum(len(example.ids) for example in examples)
    pack = Pack(
        lengths,
        tuple(place[parents[s]] if parents[s] >= 0 else -1 for s in keep),
        tuple(origin),
        tuple(order),
        tuple(paths[example] for example in order),
        sum(lengths),
        logical,
        0,
    )
    return Forest(pack, examples, store)


def rows_of(batch: Batch, path: Sequence[int]) -> list[int]:
    """Buffer rows of an example's tokens."""
    layout = batch.layout
    return [token for s in path for token in range(layout.starts[s], layout.starts[s] + layout.lengths[s])]


def check_buffer(batch: Batch, pack: Pack, examples: Sequence[Example]) -> None:
    """Along every member's path stand its ids, its position ids and its images, each image once in the buffer."""
    ids = batch.input_ids[0].numpy()
    positions = batch.position_ids.reshape(-1, len(ids)).numpy()
    starts = [i for i, token in enumerate(ids) if token == image_token() and (not i or ids[i - 1] != token)]
    counts = [int(np.prod(grid)) for grid in batch.grids]
    assert len(starts) == len(counts)
    pixels = np.split(batch.pixel_values.numpy(), np.cumsum(counts)[:-1]) if counts else []
    at_row = dict(zip(starts, zip(batch.grids, pixels, strict=True), strict=True))
    for member, path in zip(pack.members, pack.paths, strict=True):
        rows, example = rows_of(batch, path), examples[member]
        assert np.array_equal(ids[rows], example.ids)
        assert np.array_equal(positions[:, rows], example.position_ids)
        for image in example.images:
            grid, own = at_row[rows[image.start]]
            assert grid == image.grid
            assert np.array_equal(own, image.load())


def check_targets(batch: Batch, pack: Pack, examples: Sequence[Example], weights: EntryWeights) -> float:
    """The table holds exactly what each example alone asks for; returns the sum of its weights."""
    targets = batch.targets
    pairs = list(zip(targets.rows.tolist(), targets.ids.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs) == len(targets)
    wanted: defaultdict[tuple[int, int], float] = defaultdict(float)
    entries = []
    for index, (member, path) in enumerate(zip(pack.members, pack.paths, strict=True)):
        rows, example = rows_of(batch, path), examples[member]
        count = int(example.target.sum())
        for token in range(len(example.ids)):
            if example.target[token]:
                pair = (rows[token - 1], int(example.ids[token]))
                wanted[pair] += weights.of(count)
                entries.append((index, pair))
    assert entries == [
        (owner, pairs[target])
        for owner, target in zip(targets.entry_example.tolist(), targets.entry_target.tolist(), strict=True)
    ]
    assert set(pairs) == set(wanted)
    for pair, weight in zip(pairs, targets.weights.tolist(), strict=True):
        assert weight == pytest.approx(wanted[pair], rel=1e-6)
    return float(targets.weights.double().sum())


@pytest.mark.parametrize("weighting", ["example", "token"])
@pytest.mark.parametrize("images", [True, False], ids=["images", "text"])
def test_a_random_pack_is_its_examples_alone(weighting: Any, images: bool) -> None:
    several = crossing = 0
    for seed in range(60):
        forest = random_forest(seed, images)
        pack, examples = forest.pack, forest.examples
        weights = entry_weights(weighting, [int(examples[m].target.sum()) for m in pack.members])
        batch = collate(pack, examples, weights)
        assert len(forest.store.loaded) == len(batch.grids)
        check_buffer(batch, pack, examples)
        assert check_targets(batch, pack, examples, weights) == pytest.approx(1, rel=1e-5)
        assert batch.position_ids.shape == ((3, 1, pack.positions) if images else (1, pack.positions))
        assert (batch.positions, batch.logical, batch.members) == (pack.positions, pack.logical, pack.members)
        assert [t.dtype for t in (batch.input_ids, batch.position_ids, batch.targets.rows)] == [torch.int64] * 3
        assert batch.targets.weights.dtype == torch.float32
        rows = batch.targets.rows.tolist()
        several += len(rows) > len(set(rows))
        ends = {batch.layout.starts[s] + batch.layout.lengths[s] - 1 for s in set(pack.parents) - {-1}}
        crossing += bool(ends & set(rows))
    assert several, "a row that predicts several tokens"
    assert crossing, "a target that starts a segment"


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Example]:
    """Real rows: no image, one in the prefix, in the item, in both; equal rows; a conversation that is continued."""
    folder = tmp_path_factory.mktemp("rows")
    for index, size in enumerate([(32, 32), (48, 80), (320, 224)]):
        chats.draw(folder / f"{index}.png", *size, seed=index)
    rows = []
    for index in range(5):
        rows.append(row(f"Which is number {index}?", f"Number {index}.", system="Answer in two words."))
        rows.append(row([picture(f"{index % 3}.png"), text(f"And {index}?")], "A seven.", system="Look closely."))
        shown = [text("Example: "), picture("2.png"), text(" is a nine. Now ")]
        rows.append(row([*shown, text(f"number {index}?")], "A nine."))
        rows.append(row([*shown, picture(f"{index % 2}.png"), text("?")], "A four."))
    rows += [rows[0], rows[1], rows[6]]
    longer = row("Which is number 0?", "Number 0.", system="Answer in two words.")
    longer["messages"] += row("Sure?", "Yes, sure.")["messages"]
    return load_examples(chats.write(folder / "d.jsonl", [*rows, longer]), chats.renderer(), 4096)


def planned(examples: Sequence[Example], cap: int, mode: Any = "shared", min_shared: int = 1) -> list[Pack]:
    """All packs of one update that holds all examples, on 2 ranks."""
    forest = build_forest([example.keys for example in examples], min_shared)
    config = PackConfig(mode=mode, max_positions=cap, min_shared=min_shared, examples_per_update=len(examples))
    plan = plan_epoch([len(example.ids) for example in examples], forest, config, 2, 0, 0)
    return [pack for update in plan.updates for rank in update for pack in rank]


@pytest.mark.parametrize(("cap", "mode"), [(5000, "shared"), (700, "shared"), (400, "shared"), (700, "standalone")])
@pytest.mark.parametrize("min_shared", [1, 16])
def test_planned_packs_are_their_examples_alone(
    rendered: Sequence[Example], cap: int, mode: str, min_shared: int
) -> None:
    packs = planned(rendered, cap, mode, min_shared)
    weights = entry_weights("example", [int(example.target.sum()) for example in rendered])
    total = 0.0
    for pack in packs:
        batch = collate(pack, rendered, weights)
        if pack.members:
            check_buffer(batch, pack, rendered)
            total += check_targets(batch, pack, rendered, weights)
    assert sorted(member for pack in packs for member in pack.members) == list(range(len(rendered)))
    assert total == pytest.approx(1, rel=1e-5)


def check_positions(packs: list[Pack], examples: Sequence[Example]) -> None:
    """The model's own index function on each example alone gives the pack's ids, token for token."""
    index = PositionIndex(chats.config())
    weights = EntryWeights("token", 1, 1)
    for pack in packs:
        batch = collate(pack, examples, weights)
        for member, path in zip(pack.members, pack.paths, strict=True):
            alone = index(examples[member].ids, [image.grid for image in examples[member].images])
            assert np.array_equal(batch.position_ids[:, 0, rows_of(batch, path)], alone)


def test_r06_pack_ids_are_standalone_ids(rendered: Sequence[Example], monkeypatch: pytest.MonkeyPatch) -> None:
    """Image in the item, in the prefix, in both. The fault: the index function applied to the buffer as one text."""
    packs = planned(rendered, 5000)
    assert any(len(pack.members) > 1 and -1 in pack.parents[1:] for pack in packs)
    check_positions(packs, rendered)

    def over_the_buffer(pieces: list[tuple[Example, int, int]]) -> torch.Tensor:
        ids = np.concatenate([example.ids[a:b] for example, a, b in pieces])
        grids = [image.grid for example, a, b in pieces for image in example.images if a <= image.start < b]
        return torch.tensor(PositionIndex(chats.config())(ids, grids))[:, None]

    monkeypatch.setattr(collate_module, "position_ids", over_the_buffer)
    with pytest.raises(AssertionError):
        check_positions(packs, rendered)


def check_continuations(packs: list[Pack], examples: Sequence[Example]) -> int:
    """A continuation that begins with text starts at its root path's largest coordinate + 1; returns how many do."""
    seen = 0
    for pack in packs:
        batch = collate(pack, examples, EntryWeights("token", 1, 1))
        for path in pack.paths:
            for depth in range(1, len(path)):
                start = batch.layout.starts[path[depth]]
                before = batch.position_ids[:, 0, rows_of(batch, path[:depth])]
                if batch.input_ids[0, start] != image_token() and (before[0] != before[2]).any():
                    assert (batch.position_ids[:, 0, start] == before.max() + 1).all()
                    seen += 1
    return seen


def test_r07_continuations_go_on_after_a_prefix_with_an_image(
    rendered: Sequence[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two faults: continuations start at zero, or at the number of tokens before them."""
    packs = planned(rendered, 5000)
    assert check_continuations(packs, rendered) > 5

    def restarted(pieces: list[tuple[Example, int, int]]) -> torch.Tensor:
        parts = [example.position_ids[:, a:b] - example.position_ids[:, a : a + 1] for example, a, b in pieces]
        return torch.tensor(np.concatenate(parts, axis=1))[:, None]

    def counted(pieces: list[tuple[Example, int, int]]) -> torch.Tensor:
        parts = [
            example.position_ids[:, a:b] - example.position_ids[:, a : a + 1] + (a if a else 0)
            for example, a, b in pieces
        ]
        return torch.tensor(np.concatenate(parts, axis=1))[:, None]

    for fault in (restarted, counted):
        monkeypatch.setattr(collate_module, "position_ids", fault)
        with pytest.raises(AssertionError):
            check_continuations(packs, rendered)


def check_every_target_counts(packs: list[Pack], examples: Sequence[Example], weights: EntryWeights) -> None:
    """The weights sum to what standalone buffers give, example by example."""
    for pack in packs:
        batch = collate(pack, examples, weights)
        check_targets(batch, pack, examples, weights)
        whole = sum(int(examples[m].target.sum()) * weights.of(int(examples[m].target.sum())) for m in pack.members)
        assert float(batch.targets.weights.sum()) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("weighting", ["example", "token"])
def test_r08_every_target_token_has_its_weight(weighting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that starts a segment included. Faults: only the last token has a loss; none that starts a segment."""
    forests = [random_forest(seed) for seed in range(20)]

    def check() -> None:
        for forest in forests:
            counts = [int(forest.examples[m].target.sum()) for m in forest.pack.members]
            check_every_target_counts([forest.pack], forest.examples, entry_weights(weighting, counts))

    check()
    stock, whole = collate_module.target_tokens, collate_module._targets
    monkeypatch.setattr(collate_module, "target_tokens", lambda example: stock(example)[-1:])
    with pytest.raises(AssertionError):
        check()
    monkeypatch.undo()

    def within_segments(places: Any, members: list[Example], *rest: Any) -> Any:
        """Labels shifted segment by segment: the first token of each has none."""
        own = [np.diff(place, prepend=-1) == 1 for place in places]
        kept = [replace(example, target=example.target & inside) for example, inside in zip(members, own, strict=True)]
        pairs = [(place, example) for place, example in zip(places, kept, strict=True) if example.target.any()]
        return whole([place for place, _ in pairs], [example for _, example in pairs], *rest)

    monkeypatch.setattr(collate_module, "_targets", within_segments)
    with pytest.raises(AssertionError):
        check()


def check_no_foreign_labels(forest: Forest) -> None:
    """The row that predicts a token lies on that token's own root path, one token before it."""
    pack, batch = forest.pack, collate(forest.pack, forest.examples, EntryWeights("token", 1, 1))
    entries = zip(batch.targets.entry_example.tolist(), batch.targets.entry_target.tolist(), strict=True)
    for owner, target in entries:
        rows = rows_of(batch, pack.paths[owner])
        assert int(batch.targets.rows[target]) in rows
        place = rows.index(int(batch.targets.rows[target]))
        assert batch.input_ids[0, rows[place + 1]] == batch.targets.ids[target]
        assert forest.examples[pack.members[owner]].target[place + 1]


def test_r09_no_label_crosses_into_another_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: labels shifted over the buffer, so that a segment's first label falls to whatever lies before it."""
    forests = [random_forest(seed) for seed in range(20)]

    def check() -> None:
        for forest in forests:
            check_no_foreign_labels(forest)

    check()
    monkeypatch.setattr(collate_module, "prediction_rows", lambda place, targets: place[targets] - 1)
    with pytest.raises(AssertionError):
        check()


def test_r23_a_broken_image_is_found_before_any_weight_is_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All images are decoded when the data is read. The fault: the first pack that needs one finds it broken."""
    chats.draw(tmp_path / "good.png")
    content = chats.draw(tmp_path / "bad.png").read_bytes()
    (tmp_path / "bad.png").write_bytes(content[:-40])
    rows = [row([picture(name), text("?")], id=name) for name in ("good.png", "bad.png")]
    path = chats.write(tmp_path / "d.jsonl", [*rows, row()])

    def update() -> None:
        examples = load_examples(path, chats.fresh_renderer(), 4096, on_bad="skip")
        weights = entry_weights("example", [int(example.target.sum()) for example in examples])
        packs = planned(examples, 4096, "standalone")
        used = [pack for pack in packs if pack.members and examples[pack.members[0]].id != "bad.png"]
        weight = sum(float(collate(pack, examples, weights).targets.weights.sum()) for pack in used)
        assert weight == pytest.approx(1, rel=1e-6)

    update()
    for module in ("images", "render"):
        monkeypatch.setattr(f"prefix_train.{module}.decode", lambda path, source: chats.blank())
    with pytest.raises(AssertionError):
        update()


def test_weights_are_fixed_by_counts_over_the_whole_update() -> None:
    by_example, by_token = entry_weights("example", [1, 4]), entry_weights("token", [1, 4])
    assert (by_example.of(1), by_example.of(4)) == (1 / 2, 1 / 8)
    assert (by_token.of(1), by_token.of(4)) == (1 / 5, 1 / 5)
    for counts in ([], [3, 0]):
        with pytest.raises(ValueError, match="at least one target token"):
            entry_weights("example", counts)


def test_weights_for_proofs_are_exact() -> None:
    forest = random_forest(3)
    weights = entry_weights("example", [int(forest.examples[m].target.sum()) for m in forest.pack.members])
    batch = collate(forest.pack, forest.examples, weights, torch.float64)
    assert batch.targets.weights.dtype == torch.float64
    assert float(batch.targets.weights.sum()) == pytest.approx(1, rel=1e-14)


@pytest.mark.parametrize("images", [True, False], ids=["images", "text"])
def test_a_pack_without_members_is_one_token_without_a_target(images: bool) -> None:
    examples = random_forest(1, images).examples
    batch = collate(EMPTY, examples, EntryWeights("example", 1, 1))
    assert batch.input_ids.shape == (1, 1)
    assert batch.input_ids.item() != image_token()
    assert batch.position_ids.shape == ((3, 1, 1) if images else (1, 1))
    assert batch.layout.total == 1
    assert (batch.positions, batch.logical, batch.members, len(batch.targets)) == (0, 0, (), 0)
    assert batch.pixel_values is None
    assert batch.image_grid_thw is None


def test_one_layout_is_built_for_a_pack() -> None:
    forest = random_forest(2)
    before = Layout.builds
    collate(forest.pack, forest.examples, EntryWeights("token", 1, 1)).to("meta")
    assert Layout.builds == before + 1


def sharing_member(forest: Forest) -> int:
    """A member whose first segment is copied from another."""
    pack = forest.pack
    pairs = zip(pack.members, pack.paths, strict=True)
    return next(member for member, path in pairs if pack.origin[path[0]][0] != member)


@pytest.mark.parametrize("what", ["ids", "keys", "position_ids"])
def test_members_that_differ_within_a_segment_are_an_error(what: str) -> None:
    forest = random_forest(4)
    member = sharing_member(forest)
    values = np.array(getattr(forest.examples[member], what))
    values[..., 0] += 1
    examples = list(forest.examples)
    examples[member] = replace(examples[member], **{what: values})
    name = {"ids": "token ids", "keys": "keys", "position_ids": "position ids"}[what]
    with pytest.raises(ValueError, match=f"differ in {name}"):
        collate(forest.pack, examples, EntryWeights("token", 1, 1))


def test_members_whose_images_differ_behind_equal_keys_are_an_error() -> None:
    store = Pixels()
    shared = Piece([1, 2, image_token(), 5, 3], [(2, 0)])
    first, second = (example_of([shared, Piece([end], [])], 1, f"e{end}", store, True) for end in (1, 2))
    pack = Pack((5, 1, 1), (-1, 0, 0), ((0, 0), (0, 5), (1, 5)), (0, 1), ((0, 1), (0, 2)), 7, 12, 0)
    collate(pack, [first, second], EntryWeights("token", 1, 1))
    other = replace(second, images=(replace(second.images[0], digest="3"),))
    with pytest.raises(ValueError, match="share segment 0 but differ in images"):
        collate(pack, [first, other], EntryWeights("token", 1, 1))


def test_an_image_cut_by_a_boundary_is_an_error() -> None:
    example = example_of([Piece([1, *[image_token()] * 8, 5, 3], [(1, 3)])], 1, "e", Pixels(), True)
    pack = Pack((4, 7), (-1, 0), ((0, 0), (0, 4)), (0,), ((0, 1),), 11, 11, 0)
    with pytest.raises(ValueError, match="boundary cuts the image"):
        collate(pack, [example], EntryWeights("token", 1, 1))


def test_a_plan_of_other_examples_is_an_error() -> None:
    example = example_of([Piece([1, 2, 3, 4], [])], 2, "e", Pixels(), False)
    weights = EntryWeights("token", 1, 1)
    with pytest.raises(ValueError, match="segments hold 3 tokens, the example 4"):
        collate(standalone(0, 3), [example], weights)
    with pytest.raises(ValueError, match="no path from a root"):
        collate(Pack((2, 2), (-1, 0), ((0, 0), (0, 2)), (0,), ((1, 0),), 4, 4, 0), [example], weights)
    with pytest.raises(ValueError, match=r"no member of the pack uses its segments \[1\]"):
        collate(Pack((4, 2), (-1, 0), ((0, 0), (0, 2)), (0,), ((0,),), 6, 4, 0), [example], weights)
    for target in ([True, True, True, True], [False] * 4):
        with pytest.raises(ValueError, match="no target, or one that no token stands before"):
            collate(standalone(0, 4), [replace(example, target=np.array(target))], weights)


@pytest.mark.parametrize("empty", [False, True], ids=["examples", "empty"])
def test_a_batch_is_on_the_cpu_whatever_the_default_device(empty: bool) -> None:
    forest = random_forest(6)
    pack, weights = EMPTY if empty else forest.pack, EntryWeights("token", 1, 1)
    expected = collate(pack, forest.examples, weights)
    with torch.device("meta"):
        batch = collate(pack, forest.examples, weights)
    assert torch.equal(batch.input_ids, expected.input_ids)
    assert torch.equal(batch.position_ids, expected.position_ids)
    assert torch.equal(batch.layout.positions, expected.layout.positions)
    for name in ("rows", "ids", "weights", "entry_example", "entry_target"):
        assert torch.equal(getattr(batch.targets, name), getattr(expected.targets, name))
    if not empty:
        assert expected.pixel_values is not None
        assert batch.pixel_values is not None
        assert expected.image_grid_thw is not None
        assert batch.image_grid_thw is not None
        assert torch.equal(batch.pixel_values, expected.pixel_values)
        assert torch.equal(batch.image_grid_thw, expected.image_grid_thw)


def test_moving_a_batch_moves_all_of_it() -> None:
    forest = random_forest(6)
    batch = collate(forest.pack, forest.examples, EntryWeights("token", 1, 1))
    assert batch.grids
    assert batch.to("cpu") is batch
    moved = batch.to("meta")
    for name in ("input_ids", "position_ids", "pixel_values", "image_grid_thw"):
        tensor = getattr(moved, name)
        assert (tensor.device.type, tensor.shape, tensor.dtype) == (
            "meta",
            getattr(batch, name).shape,
            getattr(batch, name).dtype,
        )
    for name in ("rows", "ids", "weights", "entry_example", "entry_target"):
        tensor = getattr(moved.targets, name)
        assert (tensor.device.type, tensor.shape, tensor.dtype) == (
            "meta",
            getattr(batch.targets, name).shape,
            getattr(batch.targets, name).dtype,
        )
    assert moved.layout.segment_of.device.type == "meta"
    assert (moved.grids, moved.members, moved.positions) == (batch.grids, batch.members, batch.positions)
