"""The command `prefix-train`: reads arguments, calls one function, prints. Each command imports what it needs."""

from __future__ import annotations

import typer

from configs.console import make_app, run

app = make_app("Fine-tunes (vision-)language models on shared-prefix packs.")


def main() -> None:
    """Entry point of the console script."""
    run(app)


if __name__ == "__main__":
    main()
