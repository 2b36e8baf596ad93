"""Words that agree with their number, and values as error lines show them."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """So many of `what`, a word in the singular whose plural ends in s: `1 pack`, `1,499 examples`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def shown(value: object) -> str:
    """A user's value for an error line: quoted, control characters escaped, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
