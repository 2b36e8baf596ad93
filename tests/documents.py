"""Pages of Markdown as the tests of the documentation see them: blocks of code, commands within the text, links.

Each `wrong_*` function says what is wrong, a line per fault, with page and line; an empty list means nothing is.
Commands are parsed by the applications that they start, so that a page cannot name what does not exist.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify
from markdown_it import MarkdownIt
from markdown_it.token import Token

from configs import compose
from configs.console import UsageError
from configs.errors import UserError
from configs.schema import Config
from docs import reference
from slurm import sweep

ROOT = Path(__file__).parents[1]

OTHERS = ("cat", "cd", "cp", "export", "git", "less", "ls", "pre-commit", "scancel", "sinfo", "squeue", "tail")
"""Programs of others that pages may show."""
STARTED_BY_SRUN = ("python", "prefix-train")

MARKERS = ("slow", "gpu", "cluster")


@dataclass(frozen=True)
class Block:
    """A block of code. note: the comment directly before it, `<!-- ... -->`, without its marks."""

    page: Path
    line: int
    language: str
    text: str
    note: str = ""

    @property
    def where(self) -> str:
        return f"{self.page.name}:{self.line}"


def pages() -> list[Path]:
    """Every page that people read."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def _tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of `page`; one that is indented has the language `indented`."""
    tokens = _tokens(page)
    for before, token in pairwise([Token("", "", 0), *tokens]):
        if token.type in ("fence", "code_block"):
            comment = (
                re.fullmatch(r"<!--\s*(.*?)\s*-->\s*", before.content, re.S) if before.type == "html_block" else None
            )
            language = token.info.strip() if token.type == "fence" else "indented"
            yield Block(page, (token.map or [0])[0] + 1, language, token.content, comment[1] if comment else "")


def _inline(page: Path) -> Iterator[tuple[int, Token]]:
    for token in _tokens(page):
        for child in token.children or []:
            yield (token.map or [0])[0] + 1, child


# Links.


def wrong_links(page: Path) -> list[str]:
    """Links to files that do not exist or to headings that they do not have; addresses elsewhere are not looked at."""
    wrong = []
    for line, token in _inline(page):
        target = token.attrGet("href") or token.attrGet("src")
        if not target or re.match(r"[a-z]+:", str(target)):
            continue
        path, _, anchor = str(target).partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            wrong.append(f"{page.name}:{line}: {target} does not exist")
        elif anchor and file.exists() and anchor not in _headings(file):
            wrong.append(f"{page.name}:{line}: {file.name} has no heading #{anchor}")
    return wrong


def _headings(page: Path) -> set[str]:
    tokens = _tokens(page)
    return {slugify(text.content, "-") for head, text in pairwise(tokens) if head.type == "heading_open"}


def wrong_files(page: Path) -> list[str]:
    """Files of this repository that the text names in backticks and that do not exist."""
    named = re.compile(r"(?:tests|configs|docs|prefix_train|preflight|slurm|\.ci)/[\w./*-]+")
    return [
        f"{page.name}:{line}: {token.content} does not exist"
        for line, token in _inline(page)
        if token.type == "code_inline" and named.fullmatch(token.content) and not list(ROOT.glob(token.content))
    ]


# Commands.


def wrong_commands(page: Path) -> list[str]:
    """Commands in blocks and in the text that no program of this repository takes as they are written."""
    wrong = []
    for block in blocks(page):
        if block.language in ("bash", "console", "indented"):
            for line, text in _lines(block):
                wrong += [f"{page.name}:{line}: {text}: {fault}" for fault in wrong_line(text)]
    for line, token in _inline(page):
        if token.type == "code_inline" and re.match(r"(prefix-train|python -m|make) [a-z]", token.content):
            text = re.sub(r"\[.*?\]|\.\.\.", "", token.content)
            wrong += [f"{page.name}:{line}: {token.content}: {fault}" for fault in wrong_line(text, whole=False)]
    return wrong


def _lines(block: Block) -> Iterator[tuple[int, str]]:
    """Number and text of each command of a block; in `console` only what stands behind `$`."""
    text, start = "", 0
    for number, line in enumerate(block.text.splitlines(), block.line + (block.language != "indented")):
        if block.language == "console" and not text:
            if not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ")
        start = start if text else number
        text += line.removesuffix("\\")
        if not line.endswith("\\"):
            if text.strip() and not text.lstrip().startswith("#"):
                yield start, text.strip()
            text = ""


def wrong_line(text: str, *, whole: bool = True) -> list[str]:
    """What is wrong with one line of a shell. whole: arguments that are needed must be there."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if re.fullmatch(r"[;&|()]+", word):
            commands.append([])
        else:
            commands[-1].append(word)
    return [fault for words in commands if words for fault in _wrong_command(words, whole)]


def _wrong_command(words: list[str], whole: bool) -> list[str]:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if not words:
        return []
    program, *rest = [words[0].removeprefix(".venv/bin/"), *words[1:]]
    match program, rest:
        case (("python" | "python3"), ["-m", module, *arguments]):
            return _wrong_module(module, arguments, whole)
        case (("python" | "python3"), [file, *_]):
            return [] if (ROOT / file).is_file() else [f"{file} does not exist"]
        case "prefix-train", arguments:
            return _wrong_arguments(program, arguments, whole)
        case "make", targets:
            return [f"make has no target {one}" for one in targets if "=" not in one and one not in _targets()]
        case "pytest", arguments:
            return _wrong_pytest(arguments)
        case "pip", ["install", *things]:
            return [fault for thing in things for fault in _wrong_extra(thing)]
        case "srun", arguments if found := list(dropwhile(lambda word: word not in STARTED_BY_SRUN, arguments)):
            return _wrong_command(found, whole)
        case ".", [".venv/bin/activate"]:
            return []
    return [] if program in OTHERS else [f"{program} is not known here"]


def _wrong_module(module: str, arguments: list[str], whole: bool) -> list[str]:
    if f"python -m {module}" in reference.COMMANDS:
        return _wrong_arguments(f"python -m {module}", arguments, whole)
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    return [] if found else [f"there is no module {module}"]


def _wrong_arguments(program: str, words: list[str], whole: bool) -> list[str]:
    command = reference.command(reference.COMMANDS[program])
    while below := getattr(command, "commands", None):
        if not words or words[0] == "--help":
            return ["a command is missing"] if whole and not words else []
        if words[0] not in below:
            return [f"{program} has no command {words[0]}"]
        program, command, words = f"{program} {words[0]}", below[words[0]], words[1:]
    if words == ["--help"]:
        return []
    try:
        context = command.make_context(program, list(words))
    except UsageError as error:
        needed = type(error).__name__ == "MissingParameter"
        return [] if needed and not whole else [error.format_message()]  # type: ignore[attr-defined]
    given: dict[str, Any] = context.params
    swept = given.get("sweeps") or []
    return wrong_settings([*(given.get("overrides") or []), *(one for part in swept for one in _swept(part))])


def _swept(text: str) -> list[str]:
    return [chosen[0] for chosen in sweep.combinations([text])]


def wrong_settings(settings: list[str]) -> list[str]:
    """Settings `key=value` whose key or value configs/schema.py does not have. Rules over several are not asked."""
    wrong = []
    for setting in settings:
        if setting == "key=value":
            continue
        try:
            compose.with_changes(_any_config(), [setting])
        except UserError as error:
            wrong += [str(error)] if str(error).startswith("argument") else []
    return wrong


@cache
def _any_config() -> Config:
    made_up = ["data.train=x", "model.path=x", "train.epochs=1", "cluster=local", "pack.packs_per_update=2"]
    return compose.with_changes(Config(), made_up)


@cache
def _targets() -> frozenset[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY:(.*)$", makefile, re.M)
    assert phony is not None
    return frozenset(name for name in phony[1].split() if re.search(rf"^{name}:", makefile, re.M))


def _wrong_pytest(arguments: list[str]) -> list[str]:
    paths = [word.partition("::")[0] for word in arguments if word.startswith("tests/")]
    wrong = [f"{path} does not exist" for path in paths if not (ROOT / path).exists()]
    for option, value in pairwise(arguments):
        if option == "-m":
            names = set(re.findall(r"\w+", value)) - {"and", "or", "not"}
            wrong += [f"there is no marker {name}" for name in sorted(names - set(MARKERS))]
    return wrong


def _wrong_extra(thing: str) -> list[str]:
    match = re.fullmatch(r"prefix-train\[(.+)\]|\.\[(.+)\]", thing)
    if match is None:
        return []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (match[1] or match[2]).split(",")
    return [f"there is no extra {name}" for name in extras if name.strip() not in project["optional-dependencies"]]
