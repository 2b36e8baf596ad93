"""The experiment trackers that Accelerate knows: what each needs, and what it can do. Nothing is imported to tell."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from configs.errors import UserError

PACKAGES = {
    "aim": "aim",
    "clearml": "clearml",
    "comet_ml": "comet-ml",
    "dvclive": "dvclive",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""What to install for each; what is imported has the tracker's own name."""

TESTED = ("wandb", "mlflow", "trackio")
"""Those that the extra `trackers` of this project brings, in the versions that are tested."""

OFFLINE = frozenset({"mlflow", "tensorboard", "trackio", "wandb"})
"""Those that can write into the run folder or the home folder alone."""


def broken(names: Sequence[str], project: str | None, run: str | None, offline: bool) -> Iterator[str]:
    """What is wrong with the options of section `report`, a line each."""
    for name in names:
        if name not in PACKAGES:
            near = difflib.get_close_matches(name, PACKAGES, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            yield f"report.trackers: {name!r} is unknown; {hint}There are {', '.join(PACKAGES)}"
        elif offline and name not in OFFLINE:
            yield f"report.offline: {name} knows no such mode here; leave {name} out, or set report.offline=false"
    for key, text in (("project", project), ("run_name", run)):
        if text is not None and not re.fullmatch(r"[\w .-]{1,100}", text):
            yield f"report.{key} is {text!r}: give up to 100 letters, digits, spaces, dots, hyphens and underscores"


def installed_by(name: str) -> str:
    """What installs the package of a tracker."""
    return "pip install --editable '.[trackers]'" if name in TESTED else f"pip install {PACKAGES[name]}"


def require(names: Sequence[str]) -> None:
    """Raise UserError where the package of a tracker is not installed here.

    A plain folder of its name, such as W&B leaves in the working folder, is found as a package without a file.
    """
    for name in names:
        found = find_spec(name)
        if found is None or found.origin is None:
            raise UserError(
                f"report.trackers: the package of {name} is not installed: {installed_by(name)}, or leave {name} out"
            )
