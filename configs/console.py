"""How every command of the suite ends: exit status, and one line for a user's mistake."""

from __future__ import annotations

import errno
import io
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from configs.errors import UserError

USER_MISTAKE = 2
"""Exit status for what the user can fix; 1 means anything else went wrong."""

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""What typer raises for unknown options and missing arguments."""


def make_app(help_text: str) -> typer.Typer:
    """A typer application that leaves errors to `run`."""
    return typer.Typer(help=help_text, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def run(app: typer.Typer, argv: Sequence[str] | None = None) -> NoReturn:
    """Run `app` and exit: 0, the command's own status, or 2 and one line on stderr for a user's mistake."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file's name need not be text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = app(args=list(argv) if argv is not None else None, standalone_mode=False)
    except UserError as mistake:
        _complain(str(mistake))
    except UsageError as mistake:
        _complain(f"{_message(mistake)} (see --help)")
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        _complain(f"{str(error.filename)[:80]}...: {error.strerror}")
    except typer.Abort:
        sys.exit(130)
    sys.exit(status if isinstance(status, int) else 0)


def print_json(document: Any) -> None:
    """Print one JSON document as one line: the last line of a command's standard output under --json."""
    print(json.dumps(document, allow_nan=False, ensure_ascii=False), flush=True)


def _message(mistake: Exception) -> str:
    """A missing argument has no message of its own, only one that is made for printing."""
    printed: str = mistake.format_message()  # type: ignore[attr-defined]
    return printed


def _complain(line: str) -> NoReturn:
    print("error: " + " ".join(line.split()), file=sys.stderr, flush=True)
    sys.exit(USER_MISTAKE)
