"""The model of a run that streams: made without its frozen weights, prepared like others, computed block by block."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from configs.errors import UserError
from configs.schema import Config, ModelConfig
from prefix_train import model as models
from prefix_train import offload, patch
from prefix_train.budget import GIB
from prefix_train.model import Out
from prefix_train.stream import graphs, origin, pace, planner, readings, sources
from prefix_train.stream.frozen import Frozen, shared_memory
from prefix_train.stream.head import Embedding, Head
from prefix_train.stream.pace import Pace
from prefix_train.stream.ring import Figures, Ring, Source, Unit
from prefix_train.stream.schedule import resident_blocks
from prefix_train.stream.store import Store
from prefix_train.stream.walk import Down, Walk

if TYPE_CHECKING:
    from prefix_train.collate import Batch

SAYS_NOTHING = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
"""Keys of a configuration that do not decide what its model computes."""

STAYING = ("final_norm", "vision")
"""Files of a store whose tensors are in the model all the time."""


def load(config: ModelConfig, store: Store, whole: bool = False) -> tuple[PreTrainedModel, Any]:
    """The model of `config` in eval mode without its frozen weights, and its processor, as `model.load`.

    whole: with all of them, dequantised. Raises UserError where the store is not this model's.
    """
    model = models.skeleton(config, buffers=True)
    _require_same(model, config, store)
    fill(model, store, whole)
    return model, models.load_processor(config, model.config)


def _require_same(model: PreTrainedModel, config: ModelConfig, store: Store) -> None:
    """Raise UserError unless the store was made of this model: of its weights, where these are there too."""
    if store.manifest.dtype != models.DTYPES[config.dtype]:
        has = str(store.manifest.dtype).removeprefix("torch.")
        raise UserError(f"{store.folder} is read in {has}: set model.dtype={has}, or build a store for {config.dtype}")
    mine = json.loads(model.config.to_json_string(use_diff=False))
    if differ := sorted(_differences(mine, store.manifest.config, "")):
        raise UserError(f"{store.folder} was made of another model: {', '.join(differ[:3])} differ from model.path's")
    if origin.has_weights(config):
        sources.require_same(store, config)


def _differences(mine: Any, theirs: Any, name: str) -> Iterator[str]:
    """Names of what two configurations say otherwise about how a model computes."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in (mine.keys() | theirs.keys()) - SAYS_NOTHING:
            yield from _differences(mine.get(key), theirs.get(key), f"{name}.{key}".removeprefix("."))
    elif mine != theirs:
        yield name


def fill(skeleton: PreTrainedModel, store: Store, whole: bool = False) -> None:
    """Let `skeleton`, on the meta device but for its buffers, be what it would be with all its weights.

    What passes through takes no memory, unless it is wanted `whole`: it is one zero, as often as is needed. What stays
    is read. Raises UserError unless the store has every tensor of the model, in its shape and dtype, and no others.
    """
    _audit(skeleton, store)
    for name, parameter in list(skeleton.named_parameters()):
        _put(skeleton, name, torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))
    for block in store.blocks:
        if whole or block.name in STAYING:
            for name, tensor in store.tensors(block):
                _put(skeleton, name, tensor.clone())
    skeleton.tie_weights()


def prepare(model: PreTrainedModel, config: Config) -> nn.Module:
    """As `model.prepare`; products with weights that are not there, which its probe makes, take no time."""
    with _Zeros():
        return models.prepare(model, config)


class _Zeros(TorchFunctionMode):
    """A product with a matrix that is one zero, as often as is needed, is zero: torch would write it out first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and not any(args[1].stride()):
            rows, weight = args[:2]
            return rows.new_zeros(*rows.shape[:-1], len(weight))
        return func(*args, **(kwargs or {}))


def _audit(model: PreTrainedModel, store: Store) -> None:
    there = {f"{block.module}.{stored.name}": stored for block in store.blocks for stored in block.tensors}
    wanted = dict(model.named_parameters())
    unlike = {
        name
        for name in wanted.keys() & there.keys()
        if (tuple(wanted[name].shape), wanted[name].dtype) != (there[name].shape, there[name].dtype)
    }
    missing, unexpected = wanted.keys() - there.keys(), there.keys() - wanted.keys()
    models.audit(store.folder, {"missing_keys": missing, "unexpected_keys": unexpected, "mismatched_keys": unlike})


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    model.get_submodule(path)._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)


class Streamed(models.Root):
    """A root that holds what is trained and little else. model: of `load`, prepared; it moves to `device`.

    resident: how many blocks stay there. limit: bytes that the driver may say of this process; None: not asked.
    recorder: of launches, for `stream.graphs`; by default of CUDA graphs. beside: bytes that the plan leaves to CUDA
    besides torch's allocator.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        store: Store,
        device: torch.device,
        images: bool,
        resident: int,
        limit: int | None = None,
        recorder: graphs.Recorder | None = None,
        beside: int = planner.CONTEXT,
    ) -> None:
        train = config.train
        super().__init__(
            model, models.DTYPES[config.model.dtype], train.loss_chunk_rows, images, train.loss_chunk_words
        )
        self.at_once = config.stream.packs_per_visit
        self.handle = patch.handle_of(self.anatomy.decoder)
        self.handle.by_layers = True
        self.norm: nn.Module = self.anatomy.decoder.norm
        self.lowest = _lowest_adapted(self.anatomy.layers)
        self._shared = shared_memory(store.layers, self.dtype, device)
        self._frozen = [
            Frozen(layer, block, self._shared) for layer, block in zip(self.anatomy.layers, store.layers, strict=True)
        ]
        self.anatomy.base.get_input_embeddings().forward = Embedding(store)
        _leave(self.anatomy.base.get_input_embeddings())
        _leave(self.anatomy.head)
        _move(model, device)
        self.source = Source(store, device, config.stream.readers, config.stream.host == "pinned")
        units, stay = [Unit.whole(block) for block in store.layers], resident_blocks(len(store.layers), resident)
        self.ring = Ring(self.source, units, config.stream.slots, stay)
        self.head = Head(self.source, train.loss_chunk_words)
        layers, width = len(store.layers), self.anatomy.base.get_input_embeddings().embedding_dim
        self.offload = offload.make(config, layers, width, self.dtype, device, packs=self.at_once)
        self.graphs = graphs.make(
            config, self.anatomy.layers, store.layers, self._frozen, self.handle, width, self.dtype, device, recorder
        )
        self.pace: Pace | None = None
        self.limit, self._beside, self._told = limit, beside, dict[str, float]()
        self._asked_after: int | None = None
        self._before, self._positions = (Figures(), Figures()), 0
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def forward(self, batch: Batch, draw: str | None = None) -> Out:
        """As `Root.forward`."""
        return self.together([batch], [draw])[0]

    def together(self, batches: Sequence[Batch], draws: Sequence[str | None]) -> list[Out]:
        """Losses of several packs, each block computing all of them in one visit; so does their backward."""
        for batch, draw in zip(batches, draws, strict=True):
            batch.layout.draw = draw
        going = Walk(self, batches, torch.is_grad_enabled())
        self._positions += sum(batch.input_ids.numel() for batch in batches) if going.learning else 0
        if not going.learning:
            return going.up()
        outs: list[Out] = []
        losses = Down.apply(self._anchor, going, outs)  # type: ignore[no-untyped-call]
        return [Out(loss, out.each) for loss, out in zip(losses, outs, strict=True)]

    def metrics(self, seconds: float) -> dict[str, float]:
        """Of everything since this was last asked.

        stream_blocks: blocks that were read. stream_visits: with which was computed. stream_bytes: read of blocks and
        head, stream_gb_s: per second of the update. stream_waited_s: in which the host waited for them. After
        `measure_pace`, stream_bound_s: the least time (see `Pace`), stream_share: that over the update's.
        stream_driver_bytes: of this process's memory on a GPU, by the driver: after the first update, which has used
        all that later ones use but for recorded launches, and after each that has recorded some. Raises UserError where
        that is more than the budget.
        """
        blocks, head = self._since()
        nbytes, positions, self._positions = blocks.nbytes + head.nbytes, self._positions, 0
        found: dict[str, float] = {
            "stream_blocks": blocks.reads,
            "stream_visits": blocks.visits,
            "stream_bytes": nbytes,
            "stream_gb_s": nbytes / seconds / 1e9,
            "stream_waited_s": blocks.waited_s + head.waited_s,
        }
        if self.pace is not None:
            least = self.pace.least_s(nbytes, positions)
            found |= {"stream_bound_s": least, "stream_share": least / seconds}
        recorded = 0 if self.graphs is None else self.graphs.made
        if self.limit is not None and self.source.device.type == "cuda" and recorded != self._asked_after:
            self._told, self._asked_after = within(self.limit, self.source.device, self._beside), recorded
            if not self._told:
                self.limit = None  # it will not say later either
        return found | self._told

    def add_features(self, hidden: Tensor, where: Tensor, features: Tensor) -> Tensor:
        """As the decoder does behind some of its layers; see `Family.between_layers`."""
        name = self.handle.parts.family.between_layers
        assert name is not None
        added: Tensor = getattr(self.anatomy.decoder, name)(hidden, where, features)
        return added

    def measure_pace(self, positions: int) -> Pace:
        """Measure what bounds an update, with products of as many rows as a pack of so many positions has."""
        memory = (*self.ring.slots, *self.ring.stay)[0]
        if self._shared.numel():
            memory = self._shared.normal_(generator=torch.Generator(self._shared.device).manual_seed(0))
        self.pace = pace.measure(self.ring, self.source.store, self.lowest, positions, memory)
        self._since()
        return self.pace

    def _since(self) -> tuple[Figures, Figures]:
        """What blocks' ring and head's did since this was last asked."""
        now, before = (replace(self.ring.figures), replace(self.head.ring.figures)), self._before
        self._before = now
        return now[0].since(before[0]), now[1].since(before[1])

    @contextmanager
    def visit(self, index: int) -> Iterator[Tensor]:
        """Block `index` is there to be computed with: its bytes, which its modules read their parameters from."""
        with self.ring.visit(index) as memory, self._frozen[index].within(memory):
            yield memory


def within(limit: int, device: torch.device, beside: int) -> dict[str, float]:
    """What the driver says of this process's memory. UserError where that is more than `limit` bytes, of which the plan
    leaves `beside` to CUDA.

    Where it does not tell one process from another nothing is said: the allocator's limit and the plan hold all the
    same.
    """
    try:
        nbytes = readings.of_process(device)
    except readings.NoReading as error:
        print(f"the driver does not say what this process uses: {error}", flush=True)
        return {}
    if nbytes > limit:
        raise UserError(
            f"stream.budget_gib is {limit / GIB:g}, and by the driver this process uses {nbytes / GIB:.2f} GiB of the "
            f"GPU: what CUDA takes beside torch's allocator is more here than the {beside / GIB:.2f} GiB of "
            f"the plan; lower stream.budget_gib by {(nbytes - limit) / GIB:.2f}"
        )
    return {"stream_driver_bytes": nbytes}


def _lowest_adapted(layers: Sequence[nn.Module]) -> int:
    """The first block that has something to train."""
    for index, layer in enumerate(layers):
        if any(parameter.requires_grad for parameter in layer.parameters()):
            return index
    raise UserError("engine=stream: no decoder block has an adapter; name modules in adapter.targets")


def _leave(module: nn.Module) -> None:
    """A weight that is never in the model."""
    weight = module._parameters["weight"]
    assert weight is not None
    module._parameters["weight"] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)


def _move(model: nn.Module, device: torch.device) -> None:
    """Everything that is there moves to `device`."""
    for owner in model.modules():
        for parameter in owner._parameters.values():
            if parameter is not None and not parameter.is_meta:
                parameter.data = parameter.data.to(device)
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)
