"""The one exception that means: the user can fix this."""

from __future__ import annotations


class UserError(Exception):
    """A user's mistake: one line that says what is wrong, where, and what to write instead.

    Commands print it without a traceback and exit with status 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
