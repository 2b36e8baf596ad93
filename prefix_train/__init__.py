"""Fine-tuning over shared prefixes, exactly. These names make up the library; they load torch when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefix_train.layout import Layout
    from prefix_train.pack_forward import train_packs
    from prefix_train.packs import collate_packs, pack_examples, pack_heldout
    from prefix_train.patch import shared_prefix

__all__ = ["Layout", "collate_packs", "pack_examples", "pack_heldout", "shared_prefix", "train_packs"]

_DEFINED_IN = {
    "Layout": "layout",
    "collate_packs": "packs",
    "pack_examples": "packs",
    "pack_heldout": "packs",
    "shared_prefix": "patch",
    "train_packs": "pack_forward",
}


def __getattr__(name: str) -> Any:
    if name in _DEFINED_IN:
        return getattr(import_module(f"prefix_train.{_DEFINED_IN[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
