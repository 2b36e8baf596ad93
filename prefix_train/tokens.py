"""Text -> token ids and character offsets, the tokenizer's own, without reading the same long beginning twice.

A tokenizer cuts its text at added tokens before it does anything else. Where nothing else of it looks across such a
cut, the pieces between them have the same tokens wherever they stand, so that a piece is tokenized once and kept. That
is decided from the tokenizer's own definition; any other tokenizer reads every text as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

KEPT_PIECES = 512
"""Most pieces that are kept; the shared ones are used all the time and stay."""

LOCAL_PARTS = {"Sequence", "Split", "ByteLevel", "Digits", "NFC"}
"""Normalizers and pre-tokenizers that never look beyond the piece they are given."""


class Tokens:
    """Ids and offsets of texts through one fast tokenizer of transformers.

    control: the contents of its control tokens (special added tokens) and their ids. by_pieces: whether texts are
    tokenized piece by piece.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.control: dict[str, int] = {token.content: index for index, token in added.items() if token.special}
        self._cut_ids = {token.content: index for index, token in added.items() if not token.normalized}
        self._cuts = any_of(self._cut_ids)
        self.by_pieces = _is_local(self.definition())
        self._piece = lru_cache(KEPT_PIECES)(lambda piece: self._whole(piece, add_special_tokens=False))

    def __call__(self, text: str, *, add_special_tokens: bool) -> tuple[Ints, Ints]:
        """Ids [L] and character offsets [L, 2] of `text`, both int64.

        add_special_tokens: whether the tokenizer may put its own around the text, as its definition says.
        """
        if add_special_tokens and self._tokenizer.num_special_tokens_to_add():
            return self._whole(text, add_special_tokens=True)
        if not self.by_pieces or not text:
            return self._whole(text, add_special_tokens=False)
        pieces = list(self._pieces(text))
        return np.concatenate([ids for ids, _ in pieces]), np.concatenate([offsets for _, offsets in pieces])

    def definition(self) -> dict[str, Any]:
        """The tokenizer as `tokenizers` writes it, without the state that calls leave behind."""
        definition: dict[str, Any] = json.loads(self._tokenizer.backend_tokenizer.to_str())
        definition["truncation"] = definition["padding"] = None
        return definition

    def _pieces(self, text: str) -> Iterator[tuple[Ints, Ints]]:
        end = 0
        for cut in self._cuts.finditer(text):
            if cut.start() > end:
                yield self._shifted(text[end : cut.start()], end)
            yield np.array([self._cut_ids[cut.group()]]), np.array([cut.span()])
            end = cut.end()
        if end < len(text):
            yield self._shifted(text[end:], end)

    def _shifted(self, piece: str, start: int) -> tuple[Ints, Ints]:
        ids, offsets = self._piece(piece)
        return ids, offsets + start

    def _whole(self, text: str, *, add_special_tokens: bool) -> tuple[Ints, Ints]:
        encoding = self._tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        ids = np.array(encoding["input_ids"], dtype=np.int64)
        return ids, np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the leftmost and there the longest of `words`."""
    return re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or r"(?!)")


def _is_local(definition: dict[str, Any]) -> bool:
    """Whether a text's tokens are those of its pieces between added tokens, by the tokenizer's definition."""
    flags = ("lstrip", "rstrip", "single_word")
    if any(token[flag] for token in definition["added_tokens"] for flag in flags) or definition["model"].get("dropout"):
        return False
    parts = [definition[name] for name in ("normalizer", "pre_tokenizer") if definition[name]]
    while parts:
        part = parts.pop()
        if part["type"] not in LOCAL_PARTS or part.get("add_prefix_space"):
            return False
        parts += part.get("normalizers", []) + part.get("pretokenizers", [])
    return True
