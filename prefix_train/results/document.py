"""One HTML page that needs nothing else: in the look of `base.html`, hostile text as text, written whole or not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from configs import runfolder
from configs.errors import UserError
from prefix_train.results import charts

HERE = Path(__file__).parent


def render(template: Path, **values: Any) -> str:
    """The page that `template`, which extends `base.html`, makes of `values`; among them `title`."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, HERE]), autoescape=True, undefined=StrictUndefined, finalize=_visible,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["breakable"] = _breakable
    return environment.get_template(template.name).render(**values, colours=charts.COLOURS, dashes=charts.DASHES)


def write(text: str, place: Path, option: str) -> None:
    """Write a page. option: with which the user says where. Raises UserError where it cannot be written."""
    if place.is_dir():
        raise UserError(f"{place} is a folder: say which file in it, as in {option} {place / runfolder.REPORT}")
    try:
        runfolder.write_text(place, text)
    except OSError as error:
        raise UserError(f"{place} cannot be written: {error.strerror}; say where with {option} FILE.html") from error


def _breakable(text: str) -> Markup:
    """`text` whose lines may break behind dots, underscores and slashes: names of options and files on a phone."""
    return Markup("<wbr>").join(re.split(r"(?<=[._/])", charts.visible(text)))


def _visible(value: Any) -> Any:
    return value if isinstance(value, Markup) else charts.visible(str(value))
