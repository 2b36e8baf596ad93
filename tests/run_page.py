"""The page of a run as a browser has it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from prefix_train.results import page
from prefix_train.results.run import Run

VOID = {"meta", "link", "img", "br", "hr", "input", "wbr"}


class Page(HTMLParser):
    """The page as a browser has it: tags, attributes, texts, tables by caption. Fails where tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.css = ""
        self.tables: dict[str, list[list[str]]] = {}
        self.caption = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.tables[self.caption].append([])
        elif tag in ("td", "th"):
            self.tables[self.caption][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            self.css += data
            return
        self.texts.append(data)
        if self.open[-1:] == ["caption"]:
            self.caption = data
            self.tables[data] = []
        elif {"td", "th"} & set(self.open):
            self.tables[self.caption][-1][-1] += data

    def table(self, begins: str) -> dict[str, list[str]]:
        """The rows of the table whose caption begins so, by their first cell."""
        (caption,) = [caption for caption in self.tables if caption.startswith(begins)]
        return {row[0]: row[1:] for row in self.tables[caption]}


def shown(*folders: Path) -> tuple[Page, list[Run]]:
    """The page of the runs in `folders`, and what was read of them."""
    runs = page.read(folders)
    return Page(page.render(runs)), runs
