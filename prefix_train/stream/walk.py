"""One pass of a group of packs through a model whose blocks come and go: up for the losses, down for the gradients.

The model's own code makes everything before the first block (embeddings, images, rotary tables) and decides what each
block is called with; the blocks are then computed here, each for all packs of the group while it is there. Up keeps
nothing but each block's inputs. Down computes a block once more and takes its gradients in the same visit, in the
packs' order, straight into the trained parameters: a sum over packs has the order it has where the model stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from prefix_train import unit
from prefix_train.loss import PassingHead
from prefix_train.model import Out
from prefix_train.offload import Inputs
from prefix_train.stream.graphs import Play
from prefix_train.stream.schedule import walk

if TYPE_CHECKING:
    from prefix_train.collate import Batch
    from prefix_train.stream.engine import Streamed


@dataclass
class Added:
    """Features of images that the decoder adds to what a block puts out (DeepStack, https://arxiv.org/abs/2406.04334).

    where: [1, T] bool. features: [images' positions, D], with their graph where something learns from them. grad: of
    them, once the way down has come by.
    """

    where: Tensor
    features: Tensor
    grad: Tensor | None = None

    @property
    def learns(self) -> bool:
        """Whether something is trained that the features come from."""
        return self.features.requires_grad


@dataclass
class Passage:
    """One pack on its way. calls: what each block is given besides the hidden states, [1, T, D]. added: by the block
    behind which they are.

    entry: what the first block is given, with the graph that made it; none where nothing before the blocks learns, and
    then nothing learns from `added` either: mergers are trained all together or not at all.
    inputs: of each block so far, kept for its backward. head: its prediction rows, once they are computed. grad: of
    what the block that comes next on the way down has put out. play: its recorded launches, where there are any.
    """

    batch: Batch
    entry: Tensor | None
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    hidden: Tensor
    inputs: Inputs
    head: PassingHead | None = None
    grad: Tensor | None = None
    play: Play | None = None
    added: dict[int, Added] = field(default_factory=dict)


class Walk:
    """The pass of one group. learning: gradients will be wanted."""

    def __init__(self, root: Streamed, batches: Sequence[Batch], learning: bool) -> None:
        self.root, self.learning = root, learning
        self.passages: list[Passage] = []
        self._batches = batches
        self._done = False

    def up(self) -> list[Out]:
        """Loss of each pack."""
        root = self.root
        self.passages = [self._enter(batch) for batch in self._batches]
        blocks = len(root.anatomy.layers)
        root.ring.begin(walk(blocks, self._lowest() if self.learning else None), walk(blocks, None))
        root.head.begin(2 if self.learning else 1)
        with torch.no_grad():
            for index, layer in enumerate(root.anatomy.layers):
                with root.visit(index) as memory:
                    for passage in self.passages:
                        self._rise(passage, index, layer, memory)
            return self._losses()

    def down(self, loss_grads: Sequence[Tensor]) -> None:
        """Add the gradients of all packs to the trained parameters'."""
        if self._done:
            raise RuntimeError("these packs went backward already, and nothing of them was kept")
        self._done = True
        root = self.root
        for passage, grad in zip(self.passages, loss_grads, strict=True):
            self._turn(passage, grad)
        for index in reversed(range(self._lowest(), len(root.anatomy.layers))):
            with root.visit(index) as memory:
                for passage in self.passages:
                    if index >= self._lowest_of(passage):
                        self._fall(passage, index, memory)
        for passage in self.passages:
            self._leave(passage)
            if passage.play is not None:
                passage.play.release()
        self.passages.clear()

    def _enter(self, batch: Batch) -> Passage:
        """Everything before the first block, through the model's own forward, in which blocks only take notes."""
        root = self.root
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        added: dict[int, Added] = {}
        with torch.set_grad_enabled(self.learning), root.copies or nullcontext(), _noting(root, calls, added):
            entry: Tensor = root.anatomy.body(**root._inputs(batch)).last_hidden_state
        play = root.graphs.enter(batch.layout, calls) if root.graphs is not None and self.learning else None
        inputs = Inputs(root.offload)
        learns = entry if entry.requires_grad else None
        return Passage(batch, learns, calls, entry.detach(), inputs, play=play, added=added)

    def _leave(self, passage: Passage) -> None:
        """Backward through what came before the blocks, in one pass, since what they share is kept for one."""
        if passage.entry is None:
            return
        learning = [added for added in passage.added.values() if added.learns]
        torch.autograd.backward(
            [passage.entry, *(added.features for added in learning)],
            [passage.grad, *(added.grad for added in learning)],
        )

    def _rise(self, passage: Passage, index: int, layer: nn.Module, memory: Tensor) -> None:
        args, kwargs = passage.calls[index]
        if self.learning:
            passage.inputs.push(passage.hidden)
        if passage.play is not None and passage.play.ready(index, memory):
            passage.hidden = passage.play.up(index, memory, passage.hidden)
        else:
            passage.hidden = layer(passage.hidden, *args, **kwargs)
            self.root.handle.check_reached(passage.batch.layout, index)
        if added := passage.added.get(index):
            passage.hidden = self.root.add_features(passage.hidden, added.where, added.features)

    def _losses(self) -> list[Out]:
        """The head passes by all packs' prediction rows."""
        root = self.root
        heads, orders = [], []
        for passage in self.passages:
            passage.head, order = PassingHead.of(root.norm(passage.hidden)[0], passage.batch.targets, root.chunk_rows)
            heads.append(passage.head)
            orders.append(order)
        for first, tile in root.head.tiles():
            for head in heads:
                head.see(first, tile)
        if self.learning:
            for first, tile in root.head.tiles():
                for head in heads:
                    head.learn(first, tile)
        return [
            Out(head.total, torch.empty_like(head.each).index_copy_(0, order, head.each))
            for head, order in zip(heads, orders, strict=True)
        ]

    def _turn(self, passage: Passage, loss_grad: Tensor) -> None:
        """From the loss to what the last block put out."""
        assert passage.head is not None
        grad = passage.head.hidden_grad(passage.hidden.shape[1], loss_grad)[None]
        passage.head = None
        hidden = passage.hidden.requires_grad_()
        with torch.enable_grad():
            normed = self.root.norm(hidden)
        (passage.grad,) = torch.autograd.grad(normed, hidden, grad)
        del passage.hidden

    def _fall(self, passage: Passage, index: int, memory: Tensor) -> None:
        """One block, once more and backward."""
        args, kwargs = passage.calls[index]
        if (added := passage.added.get(index)) and added.learns:
            assert passage.grad is not None
            added.grad = passage.grad[added.where].to(added.features.dtype)
        source, wanted = passage.inputs.pop(), index > self._lowest_of(passage) or passage.entry is not None
        if passage.play is not None and passage.play.ready(index, memory, wanted):
            assert passage.grad is not None
            passage.grad = passage.play.down(index, memory, source, passage.grad, wanted)
            return
        source.requires_grad_(wanted)
        with torch.enable_grad():
            end: Tensor = _End.apply(  # type: ignore[no-untyped-call]
                unit.again(self.root.anatomy.layers[index], source, *args, **kwargs), passage
            )
        torch.autograd.backward(end, end)  # any gradient: nothing is launched to make one
        passage.grad = source.grad

    def _lowest(self) -> int:
        """The last block that is gone back through."""
        return min(map(self._lowest_of, self.passages))

    def _lowest_of(self, passage: Passage) -> int:
        return self.root.lowest if passage.entry is None else 0


class _End(torch.autograd.Function):
    """In place of what a block puts out, which nobody reads on the way down: its memory, and that of its gradient once
    that has been passed on, are free while the block goes backward."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, passage: Passage) -> Tensor:
        ctx.passage = passage
        return out.new_empty(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        grad, ctx.passage.grad = ctx.passage.grad, None
        return grad, None


class Down(torch.autograd.Function):
    """A group's losses, whose backward is the way down. anchor: a leaf that wants a gradient and gets none."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, going: Walk, outs: list[Out]) -> tuple[Tensor, ...]:
        outs += going.up()
        ctx.going = going
        return tuple(out.loss for out in outs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *loss_grads: Tensor) -> tuple[None, None, None]:
        ctx.going.down(loss_grads)
        return None, None, None


@contextmanager
def _noting(
    root: Streamed, calls: list[tuple[tuple[Any, ...], dict[str, Any]]], added: dict[int, Added]
) -> Iterator[None]:
    """Blocks note in `calls` what they are given, and pass hidden states on; so does the last norm. What is added to
    their outputs is noted in `added`."""

    def note(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append((args, kwargs))
        return hidden

    def note_added(hidden: Tensor, where: Tensor, features: Tensor) -> Tensor:
        added[len(calls) - 1] = Added(where, features)
        return hidden

    decoder, between = root.anatomy.decoder, root.handle.parts.family.between_layers
    with ExitStack() as noting:
        noting.enter_context(_in_place_of(root.anatomy.layers, note))
        noting.enter_context(_in_place_of([root.norm], lambda hidden: hidden))
        if between is not None:
            noting.enter_context(_in_place_of([decoder], note_added, between))
        yield


@contextmanager
def _in_place_of(modules: Sequence[nn.Module], function: Any, name: str = "forward") -> Iterator[None]:
    """Modules whose method `name` is another for a while."""
    own = [vars(module).get(name) for module in modules]
    for module in modules:
        setattr(module, name, function)
    try:
        yield
    finally:
        for module, before in zip(modules, own, strict=True):
            if before is None:
                delattr(module, name)
            else:
                setattr(module, name, before)
