"""Words that agree with their number."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """So many of `what`, a word in the singular whose plural ends in s: `1 pack`, `1,499 examples`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
