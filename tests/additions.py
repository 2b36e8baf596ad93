"""Chat rows that add numbers under one instruction, for tests that train whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "system", "content": "Add the numbers. Answer in one short sentence."},
                {"role": "user", "content": f"How much is {index} and {3 * index}?"},
                {"role": "assistant", "content": f"It is {4 * index}."},
            ]
        }
        for index in range(count)
    ]


def write(path: Path, given: int | list[dict[str, Any]]) -> Path:
    """JSONL of so many rows, or of these."""
    made = rows(given) if isinstance(given, int) else given
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path
