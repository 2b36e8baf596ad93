"""A conversation -> the exact token ids of the standalone example, its position ids, images and target.

L tokens of an example. The model's own chat template, processor and index function decide; nothing here knows a family.
The first example with images and the first without are also rendered by the processor in one piece and compared, so
that a processor which does more than this module expects is refused instead of followed wrongly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import MODEL_MAPPING, PreTrainedConfig

from configs.errors import UserError
from configs.wording import shown
from prefix_train import chat
from prefix_train.chat import Conversation
from prefix_train.images import ImageRef, ImageStore, Inline, Origin, decode, locate
from prefix_train.template import ChatTemplate, Targets
from prefix_train.tokens import Tokens, any_of


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One training record, rendered as it would be alone. Arrays are read-only.

    ids: [L] int64. keys: [L] int64, what the tree compares: the ids, but inside an image's placeholders
    -(1 + 62 bits of the image's digest). position_ids: [3, L] int64 for M-RoPE models, else [1, L]. target: [L] bool,
    the last answer's tokens through its end-of-turn token, or all answers'. answer: the last answer's text without that
    token. prompt_length: tokens before the last answer. source: `file:line`, of a row with several targets with the
    number of one behind it.
    """

    id: str
    source: str
    ids: NDArray[np.int64]
    keys: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    target: NDArray[np.bool_]
    images: tuple[ImageRef, ...]
    answer: str
    prompt_length: int


class PositionIndex:
    """Position ids of standalone examples, from the model's own index function."""

    def __init__(self, config: PreTrainedConfig) -> None:
        """Raises UserError where transformers has no model for `config`."""
        if type(config) not in MODEL_MAPPING:
            raise UserError(f"transformers has no model class for {type(config).__name__}")
        model_class = MODEL_MAPPING[type(config)]
        self.coordinates = 3 if hasattr(model_class, "get_rope_index") else 1
        # The index function needs the configuration alone: an instance without parameters carries it.
        self._model = object.__new__(model_class)
        self._model.__dict__["config"] = config
        self._image_token: int = getattr(config, "image_token_id", -1)
        self._counting = np.arange(0, dtype=np.int64)

    def __call__(self, ids: NDArray[np.int64], grids: list[tuple[int, int, int]]) -> NDArray[np.int64]:
        """[coordinates, L] for `ids` with images of these grids (t, h, w in patches)."""
        if not grids:
            if len(self._counting) < len(ids):
                self._counting = np.arange(2 * len(ids), dtype=np.int64)
            return np.broadcast_to(self._counting[: len(ids)], (self.coordinates, len(ids)))
        with torch.device("cpu"):
            row = torch.tensor(ids)[None]
            positions, _ = self._model.get_rope_index(
                row, torch.eq(row, self._image_token).int(), image_grid_thw=torch.tensor(grids, dtype=torch.int64)
            )
        return np.ascontiguousarray(positions[:, 0].numpy())


class Renderer:
    """Renders chat rows through one processor (or one tokenizer, for text) for one model configuration."""

    def __init__(
        self, processor: Any, config: PreTrainedConfig, cache_bytes: int = 1 << 30, targets: Targets = "last"
    ) -> None:
        """processor: of transformers, or a tokenizer. cache_bytes: processed pixels kept in memory. targets: which
        answers are learned, as `data.targets`.

        Raises UserError where the two do not fit each other or lack what is needed.
        """
        self._with_images = hasattr(processor, "tokenizer")
        self._processor = processor
        self._tokenizer = processor.tokenizer if self._with_images else processor
        self._position_index = PositionIndex(config)
        self._image_token: int | None = getattr(config, "image_token_id", None) if self._with_images else None
        self._vocabulary: int = config.get_text_config().vocab_size
        self._refuse_misfits(config)
        self._template, self._targets = ChatTemplate(processor), targets
        self.images = ImageStore(processor.image_processor, cache_bytes) if self._with_images else None
        self._tokens = Tokens(self._tokenizer)
        self._control_ids = np.array(sorted(self._tokens.control.values()), dtype=np.int64)
        placeholders = [getattr(processor, f"{name}_token", None) for name in ("image", "video")]
        self._control_tokens = any_of({*self._tokens.control, *(token for token in placeholders if token)})
        self._compared: set[bool] = set()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all that decides a row's rendering: template, tokenizer, image processor, model type. Hex."""
        image_processor = self._processor.image_processor.to_dict() if self._with_images else None
        parts = [
            self._processor.chat_template,
            self._tokens.definition(),
            self._tokenizer.special_tokens_map,
            image_processor,
            self._position_index.coordinates,
            self._targets,
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()

    def render(
        self,
        record: Any,
        source: str,
        folder: Path,
        again: Callable[[], Any] | None = None,
        target: int | None = None,
    ) -> Example:
        """`record` (a decoded row) as an example; image paths are below `folder`; source: `file:line`.

        again: reads the row anew, so that images in it need not stay in memory; without it `record` is kept. target:
        of a row with several which one, see `chat.targets_of`.

        Raises UserError, beginning with `source`, for whatever is wrong with the row.
        """
        source = chat.place_of(source, target)
        conversation = chat.parse(record, source, target)
        self._refuse_control_tokens(conversation, source)

        def row() -> Conversation:
            return chat.parse(record if again is None else again(), source, target)

        files = [self._locate(folder, name, source, index, row) for index, name in enumerate(conversation.images)]
        pictures = [self.images.add(path, source) for path in files] if self.images else []
        grids = [grid for grid, _ in pictures]
        text, spans = self._template.spans(conversation, source, self._targets)
        expanded = self._expand(text, grids, source)
        ids, offsets = self._tokenize(expanded)
        if (largest := int(ids.max())) >= self._vocabulary:
            raise UserError(
                f"{source}: the tokenizer writes token {largest}, and the model knows {self._vocabulary:,}: the two do "
                "not belong together"
            )
        learned = np.zeros(len(ids), dtype=np.bool_)
        for span in spans:
            gained = len(self._expand(text[: span.start], grids[: span.images], source)) - span.start
            begin, end = self._target(expanded, ids, offsets, (span.start + gained, span.end + gained), source)
            learned[begin:end] = True
        runs = self._image_runs(ids, grids, source)
        keys = ids
        for (first, last), (_, digest) in zip(runs, pictures, strict=True):
            keys = ids.copy() if keys is ids else keys
            keys[first:last] = -(1 + (int(digest, 16) >> (256 - 62)))
        self._compare_once(conversation, files, ids, source)
        position_ids = self._position_index(ids, grids)
        for array in (ids, keys, position_ids, learned):
            array.flags.writeable = False
        return Example(
            id=source if conversation.id is None else conversation.id,
            source=source,
            ids=ids,
            keys=keys,
            position_ids=position_ids,
            target=learned,
            images=self._references(runs, pictures, files),
            answer=text[spans[-1].start : spans[-1].end],
            prompt_length=begin,
        )

    def text_of(self, keys: NDArray[np.int64]) -> str:
        """Some of an example's `keys` as text, for a person: what an image's placeholders stand for is `(image)`."""
        texts: list[str] = []
        for image, run in groupby(keys.tolist(), key=lambda key: min(key, 0)):
            texts.append("(image)" if image else str(self._tokenizer.decode(list(run))))
        return "".join(texts)

    def _refuse_misfits(self, config: PreTrainedConfig) -> None:
        name = type(self._processor).__name__
        if not getattr(self._tokenizer, "is_fast", False):
            raise UserError(f"{type(self._tokenizer).__name__} gives no character offsets; use a fast tokenizer")
        if not getattr(self._processor, "chat_template", None):
            raise UserError(f"{name} has no chat template; use a chat model, or put its chat_template.jinja beside it")
        if not self._with_images:
            return
        if self._image_token != (mine := getattr(self._processor, "image_token_id", None)):
            raise UserError(
                f"{name} writes images as token {mine}, but the model's image_token_id is {self._image_token}"
            )
        merge, wanted = self._processor.image_processor.merge_size, config.vision_config.spatial_merge_size
        if merge != wanted:
            raise UserError(f"{name} merges {merge} x {merge} patches, but the model {wanted} x {wanted}")

    def _refuse_control_tokens(self, conversation: Conversation, source: str) -> None:
        for index, message in enumerate(conversation.messages):
            for text in [*message.texts, *chat.strings(message.more)]:
                if found := self._control_tokens.search(text):
                    raise UserError(
                        f"{source}: messages[{index}] holds {found.group()!r}, a control token of the model; remove it"
                    )
        for text in chat.strings(list(conversation.tools)):
            if found := self._control_tokens.search(text):
                raise UserError(f"{source}: tools hold {found.group()!r}, a control token of the model; remove it")

    def _locate(self, folder: Path, name: str, source: str, index: int, row: Callable[[], Conversation]) -> Origin:
        if not self._with_images or self._position_index.coordinates != 3:
            raise UserError(f"{source}: image {shown(name)}: this model reads text only")
        if name.startswith("data:"):
            place = f"{source}: image {index + 1} of the row"
            return Inline.of(name, place, lambda: row().images[index])
        return locate(folder, name, source)

    def _expand(self, text: str, grids: list[tuple[int, int, int]], source: str) -> str:
        """`text` with each image's placeholder repeated as its grid demands, by the processor."""
        if not grids:
            return text
        if text.count(self._processor.image_token) != len(grids):
            raise UserError(f"{source}: the chat template does not write one placeholder for each image")
        sizes = {"image_grid_thw": np.array(grids)}
        replacements = [self._processor.replace_image_token(sizes, index) for index in range(len(grids))]
        expanded: list[str] = self._processor.get_text_with_replacements([text], replacements)[0]
        return expanded[0]

    def _tokenize(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids [L] and character offsets [L, 2]."""
        begin = self._tokenizer.bos_token
        # As transformers' processors do it; its tokenizers' own templating never adds any.
        added = self._with_images and not (begin is not None and text.startswith(begin))
        return self._tokens(text, add_special_tokens=added)

    def _target(
        self,
        text: str,
        ids: NDArray[np.int64],
        offsets: NDArray[np.int64],
        span: tuple[int, int],
        source: str,
    ) -> tuple[int, int]:
        """[first, last) tokens of the characters `span` (one across its start included) and the end-of-turn token."""
        start, end = span
        closing = np.flatnonzero(np.isin(ids, self._control_ids) & (offsets[:, 0] >= end))
        if not closing.size or text[end : offsets[closing[0], 0]].strip():
            raise UserError(f"{source}: the chat template ends the answer without an end-of-turn token of the model")
        first = int(np.argmax(offsets[:, 1] > start))
        if first == 0:
            raise UserError(f"{source}: nothing stands before the answer, so that its first token cannot be predicted")
        return first, int(closing[0]) + 1

    def _image_runs(
        self, ids: NDArray[np.int64], grids: list[tuple[int, int, int]], source: str
    ) -> list[tuple[int, int]]:
        """Token ranges of the images' placeholders; each has the length that its grid demands."""
        if self._image_token is None:
            return []
        edges = np.flatnonzero(np.diff(ids == self._image_token, prepend=False, append=False))
        runs = [(int(first), int(last)) for first, last in pairwise(edges)][::2]
        merged = int(self._processor.image_processor.merge_size) ** 2
        if [last - first for first, last in runs] != [t * h * w // merged for t, h, w in grids]:
            raise UserError(f"{source}: the chat template does not keep the images' placeholders apart")
        return runs

    def _references(
        self,
        runs: list[tuple[int, int]],
        pictures: list[tuple[tuple[int, int, int], str]],
        files: list[Origin],
    ) -> tuple[ImageRef, ...]:
        if self.images is None:
            return ()
        return tuple(
            ImageRef(first, last - first, grid, digest, path, self.images)
            for (first, last), (grid, digest), path in zip(runs, pictures, files, strict=True)
        )

    def _compare_once(
        self, conversation: Conversation, files: list[Origin], ids: NDArray[np.int64], source: str
    ) -> None:
        """Raise UserError where the processor in one piece makes other ids or pixels of these messages."""
        if bool(files) in self._compared:
            return
        images = iter([decode(path, source) for path in files])
        turns = self._template.turns(conversation)
        for turn in turns:
            for part in turn["content"] if isinstance(turn["content"], list) else []:
                if part["type"] == "image":
                    part["image"] = next(images)
        out = self._template.whole(turns, conversation)
        whole = out["input_ids"][0] if self._with_images else out["input_ids"]
        same = np.array_equal(np.asarray(whole), ids)
        if files and self.images is not None:
            parts = [self.images.load(path, self.images.add(path, source)[1]) for path in files]
            same &= np.array_equal(np.asarray(out["pixel_values"]), np.concatenate(parts))
        if not same:
            raise UserError(f"{type(self._processor).__name__} renders {source} in a way that is not supported")
        self._compared.add(bool(files))
