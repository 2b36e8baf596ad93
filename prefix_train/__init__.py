"""Fine-tuning over shared prefixes, exactly. Two names make up the library; they load torch when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefix_train.layout import Layout
    from prefix_train.patch import shared_prefix

__all__ = ["Layout", "shared_prefix"]


def __getattr__(name: str) -> Any:
    if name == "Layout":
        from prefix_train.layout import Layout

        return Layout
    if name == "shared_prefix":
        from prefix_train.patch import shared_prefix

        return shared_prefix
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
