"""Random forests of segments as packs and, the same thing, as examples alone; and the pack's own run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from prefix_train.layout import Layout
from prefix_train.patch import shared_prefix
from tests import models, oracle

GRIDS = ((1, 2, 2), (1, 4, 2), (1, 4, 6), (1, 2, 8))
"""Images in patches: 1, 2, 6 and 4 tokens."""


@dataclass
class Pack:
    """A pack and its examples.

    ids: [T]. position_ids: [1, T], or [3, 1, T] for models of vision. pixels, grids: images in buffer order.
    examples: each alone. rows: [L] of each example, its tokens' places in the buffer.
    """

    layout: Layout
    ids: Tensor
    position_ids: Tensor
    pixels: Tensor | None
    grids: Tensor | None
    examples: list[oracle.Example]
    rows: list[Tensor]


@dataclass
class Segment:
    """Tokens of one segment, and its images: pixels and grids."""

    ids: list[int]
    pixels: list[Tensor]
    grids: list[tuple[int, int, int]]


def random_tree(
    seed: int, depth: int, lengths: Sequence[int], roots: int = 1, widest: int = 3
) -> tuple[list[int], list[int]]:
    """Lengths and parents of a random forest, depth first; its first path has `depth` segments, no path has more."""
    draw = random.Random(seed)
    sizes: list[int] = []
    parents: list[int] = []

    def grow(parent: int, level: int, must: bool) -> None:
        me = len(sizes)
        sizes.append(draw.choice(lengths))
        parents.append(parent)
        if level < depth and (must or draw.random() < 0.6):
            for child in range(draw.randint(2 if must else 1, widest)):
                grow(me, level + 1, must and child == 0)

    for root in range(roots):
        grow(-1, 1, root == 0)
    return sizes, parents


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each segment; a root's is 0."""
    found: list[int] = []
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def build(
    model: PreTrainedModel,
    lengths: Sequence[int],
    parents: Sequence[int],
    *,
    seed: int = 0,
    images: Sequence[int] = (),
    inner: bool = True,
) -> Pack:
    """A pack of random tokens over a forest, and its examples with random targets and weights.

    images: segments that hold an image; they become as long as it needs. inner: also make an example of a path that
    ends inside the tree, and one that two examples share whole.
    """
    draw = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    segments = [_segment(length, index in images, draw, dtype) for index, length in enumerate(lengths)]
    layout = Layout.from_tree([len(segment.ids) for segment in segments], parents)
    ends = [index for index in range(len(parents)) if index not in set(parents)]
    if inner:
        ends += [ends[0], *[parent for parent in {parents[ends[-1]]} if parent >= 0]]
    examples, rows = [], []
    for end in ends:
        path = layout.root_path(end)
        examples.append(_example([segments[index] for index in path], draw))
        spans = [torch.arange(layout.starts[i], layout.starts[i] + layout.lengths[i]) for i in path]
        rows.append(torch.cat(spans))
    every = [grid for segment in segments for grid in segment.grids]
    return Pack(
        layout,
        torch.tensor([token for segment in segments for token in segment.ids]),
        _position_ids(model, layout, examples, rows),
        torch.cat([pixels for segment in segments for pixels in segment.pixels]) if every else None,
        torch.tensor(every) if every else None,
        examples,
        rows,
    )


def run(model: PreTrainedModel, pack: Pack, attention: str = "auto", deltanet: str = "auto") -> oracle.Result:
    """The pack under `shared_prefix`: what `oracle.run` returns for its examples, from one forward and backward."""
    model.zero_grad(set_to_none=True)
    with shared_prefix(model, attention, deltanet):
        result = forward(model, pack)
        result.loss.backward()
    result.loss, result.gradients = result.loss.detach(), oracle.gradients(model)
    model.zero_grad(set_to_none=True)
    return result


def forward(model: PreTrainedModel, pack: Pack) -> oracle.Result:
    """The pack's weighted loss with its graph, each example's hidden states and losses; the model is patched."""
    given = {"input_ids": pack.ids[None], "position_ids": pack.position_ids, "layout": pack.layout, "use_cache": False}
    if pack.pixels is not None:
        given |= {"pixel_values": pack.pixels, "image_grid_thw": pack.grids}
    hidden = model.model(**given).last_hidden_state[0]
    loss: Tensor = 0  # type: ignore[assignment]
    losses = []
    for example, rows in zip(pack.examples, pack.rows, strict=True):
        logits = model.lm_head(hidden[rows[example.targets - 1]])
        losses.append(F.cross_entropy(logits, example.ids[example.targets], reduction="none"))
        loss = loss + (losses[-1] * example.weights.to(hidden.dtype)).sum()
    alone = [hidden[rows].detach() for rows in pack.rows]
    return oracle.Result(loss, alone, [each.detach() for each in losses])


def assert_same(packed: oracle.Result, alone: oracle.Result, hidden: float, gradient: float) -> None:
    """Relative bounds: `hidden` on loss and hidden states, `gradient` on each gradient tensor.

    A gradient tensor below 1e-6 of all gradients' norm is held against that.
    """
    assert abs(packed.loss - alone.loss) <= hidden * abs(alone.loss), (packed.loss, alone.loss)
    for index, (mine, theirs) in enumerate(zip(packed.hidden, alone.hidden, strict=True)):
        error, norm = (mine - theirs).norm(), theirs.norm()
        assert error <= hidden * norm, f"hidden states of example {index}: {error / norm:.1e}"
    assert packed.gradients.keys() == alone.gradients.keys()
    whole = torch.stack([each.double().norm() for each in alone.gradients.values()]).norm()
    for name, theirs in alone.gradients.items():
        error = (packed.gradients[name] - theirs).double().norm()
        norm = max(theirs.double().norm(), 1e-6 * whole)
        assert error <= gradient * norm, f"gradient of {name}: {error / norm:.1e}"


def _segment(length: int, image: bool, draw: torch.Generator, dtype: torch.dtype) -> Segment:
    if not image:
        return Segment(_words(length, draw), [], [])
    grid = GRIDS[int(torch.randint(len(GRIDS), (), generator=draw))]
    patches = grid[0] * grid[1] * grid[2]
    span = [models.VISION_START, *[models.IMAGE] * (patches // 4), models.VISION_END]
    text = _words(max(1, length - len(span)), draw)
    split = int(torch.randint(len(text) + 1, (), generator=draw))
    pixels = torch.randn(patches, models.PATCH_VALUES, generator=draw, dtype=torch.float64).to(dtype)
    return Segment([*text[:split], *span, *text[split:]], [pixels], [grid])


def _words(length: int, draw: torch.Generator) -> list[int]:
    return torch.randint(models.IMAGE, (length,), generator=draw).tolist()


def _example(path: list[Segment], draw: torch.Generator) -> oracle.Example:
    ids = torch.tensor([token for segment in path for token in segment.ids])
    candidates = torch.arange(1, len(ids))
    chosen = torch.rand(len(candidates), generator=draw) < 0.5
    if len(chosen):
        chosen[-1] = True
    weights = torch.rand(int(chosen.sum()), generator=draw, dtype=torch.float64) + 0.1
    grids = [grid for segment in path for grid in segment.grids]
    pixels = torch.cat([pixels for segment in path for pixels in segment.pixels]) if grids else None
    return oracle.Example(ids, candidates[chosen], weights, pixels, torch.tensor(grids) if grids else None)


def _position_ids(model: PreTrainedModel, layout: Layout, examples: list[oracle.Example], rows: list[Tensor]) -> Tensor:
    if not hasattr(model.model, "get_rope_index"):
        return layout.position_ids()
    buffer = torch.full((3, 1, layout.total), -1)
    for example, places in zip(examples, rows, strict=True):
        kinds = (example.ids == models.IMAGE).to(torch.int32)[None]
        own, _ = model.model.get_rope_index(example.ids[None], kinds, example.grids)
        before = buffer[:, 0, places]
        assert ((before == -1) | (before == own[:, 0])).all(), "examples that share a segment disagree on its positions"
        buffer[:, 0, places] = own[:, 0]
    return buffer
