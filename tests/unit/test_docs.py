"""What the pages say is so: links, files, commands, options, code and output; and each of these tests can fail."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

from configs import compose, rules, runfolder
from configs.schema import ModelConfig
from docs import reference
from prefix_train import evaluate
from prefix_train.metrics import Answer
from slurm import finding, policy
from tests import documents, documents_code
from tests.documents import ROOT, Block

PAGES = documents.pages()
BLOCKS = [block for page in PAGES for block in documents.blocks(page)]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_there_is_something_to_look_at() -> None:
    assert {"README.md", "first-run.md", "verdict.md", "design.md", "CONTRIBUTING.md"} <= {page.name for page in PAGES}
    assert {"python", "yaml", "json", "text", "indented"} <= {block.language for block in BLOCKS}
    assert sum(block.note.startswith(("verdict", "preflight")) for block in BLOCKS) >= 5


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    assert documents.wrong_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_are_named_exist(page: Path) -> None:
    assert documents.wrong_files(page) == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_are_commands(page: Path) -> None:
    assert documents.wrong_commands(page) == []


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.where)
def test_blocks_hold_what_they_claim(block: Block) -> None:
    assert documents_code.wrong_block(block) == []


def test_pages_are_markdown_that_any_reader_shows() -> None:
    """Admonitions, tabs and their like are text or code elsewhere."""
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").splitlines()
        assert not [line for line in lines if line.startswith(("!!! ", "??? ", "=== ", "::: "))], page


def rows(page: str, header: str) -> list[list[str]]:
    """Cells of the table of `page` whose first line begins with `header`."""
    lines = (ROOT / "docs/guides" / page).read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {header} |"))
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def names(cells: list[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_cause_and_every_class_is_told_once() -> None:
    causes = names([row[0] for row in rows("own-cluster.md", "cause in `lives/`")])
    assert sorted(causes) == sorted(policy.CAUSES)
    classes = names([row[0] for row in rows("verdict.md", "class")])
    assert sorted(classes) == sorted(get_args(finding.Kind))


def test_what_follows_an_end_is_what_is_decided() -> None:
    """Of a first life, with another node beside the one at fault, and again where that says something else."""
    for cells in rows("own-cluster.md", "cause in `lives/`"):
        for cause in names(cells[:1]):
            life = policy.Life(0, "1", ("a", "b"), cause, update=1, culprits=("a",))  # type: ignore[arg-type]
            decided = policy.decide([life], max_requeues=3, exclude_unfit=False)
            told = cells[2].split(";")[0]
            assert told.startswith("begin again") == decided.again, cause
            assert ("without" in told and decided.again) == bool(decided.exclude), cause
    gate = policy.Life(0, "1", ("a", "b"), "gate", culprits=("a",))
    assert policy.decide([gate], max_requeues=3, exclude_unfit=True).exclude == ("a",)


def test_everything_in_a_run_folder_is_told() -> None:
    told = {
        name.rstrip("/").split("/")[0] for name in names([cell for row in rows("first-run.md", "name") for cell in row])
    }
    wanted = {value for name, value in vars(runfolder).items() if name.isupper() and isinstance(value, str)}
    assert len(wanted) > 15
    assert wanted - told == set()


def test_every_field_of_a_prediction_is_told(tmp_path: Path) -> None:
    answer = Answer("form-3", "held.jsonl:3", "b", "a", True, 1)
    path = evaluate.write(tmp_path, evaluate.Scored([answer], [{"exact": 0.0}], {}, {}, None), {0: 0.5}, {}, None)
    written = json.loads(path.read_text())
    told = names([row[0] for row in rows("evaluation.md", "field")])
    assert told == list(written)
    (shown,) = [b.text for b in BLOCKS if b.language == "json" and "evaluation.md" in b.where]
    assert list(json.loads(shown)) == list(written)


# The reference.


def test_the_reference_has_every_option_with_its_meaning() -> None:
    page = reference.options_page()
    for key in compose.options():
        assert f"| `{key}`{{ #{key} }} | " in page
    assert " |  |" not in page
    assert (
        "| `train.beta1`{ #train.beta1 } | number, from 0 up to, not including, 1 | `0.9` | AdamW's first decay. |"
        in page
    )
    assert rules.AT_LEAST["stream.slots"] == 2
    assert "| `stream.slots`{ #stream.slots } | whole number, 2 or more, 4 or less | `3` | " in page


def test_what_the_log_has_measured_of_a_model_s_kernels_is_not_said_to_be_unmeasured() -> None:
    rows = "\n".join(line for line in (ROOT / "tests/bench/LOG.md").read_text().splitlines() if line.startswith("|"))
    changes = (ROOT / "CHANGELOG.md").read_text().split("\n- ")
    told = [
        *(change for change in changes if change.startswith("`model.")),
        *inspect.getsource(ModelConfig).split('"""'),
    ]
    unmeasured = [text for text in told if re.search(r"not measured yet|before it has been\s+measured", text, re.I)]
    for text in unmeasured:
        for name, value in re.findall(r"`(?:model\.)?(?:(\w+)(?:=|: ))?(\w+)`", text):
            assert f"`{value}`" not in rows
            assert f"`{name}={value}`" not in rows
    assert "`fla_forest`" in rows
    assert "`heads=fused`" in rows


def test_an_option_without_a_meaning_is_an_error() -> None:
    module = reference.griffe.visit("schema", Path("schema.py"), "class A:\n    x: int = 1\n")
    with pytest.raises(ValueError, match=r"schema\.A\.x has no docstring"):
        reference._flat(module["A.x"])


def test_the_reference_has_every_command() -> None:
    page = reference.commands_page()
    for name in (
        "prefix-train plan",
        "prefix-train bench stream",
        "python -m slurm.submit",
        "python -m preflight judge",
    ):
        assert f" `{name}`\n" in page
    assert "`--sweep" in page
    assert "| `--budget-gib <float>` | Most GPU memory, in GiB. [default: 6.0] |" in page


def test_every_application_is_in_the_reference_or_the_jobs_own() -> None:
    makers = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in ("prefix_train", "preflight", "slurm")
        for path in (ROOT / package).rglob("*.py")
        if "= make_app(" in path.read_text(encoding="utf-8")
    }
    parts = {"prefix_train.stream.cli", "prefix_train.bench_cli"}  # of prefix-train, whose page has their commands
    assert makers - parts == {*reference.COMMANDS.values(), *reference.BY_THE_JOB}
    page = reference.commands_page()
    for part in parts:
        for command in import_module(part).app.registered_commands:
            assert f"prefix-train {part.split('.')[1].removesuffix('_cli')} {command.name}`" in page


def test_the_library_page_has_every_public_name() -> None:
    import prefix_train

    assert [line[4:] for line in reference.library_page().splitlines() if line.startswith("::: ")] == [
        f"prefix_train.{name}" for name in prefix_train.__all__
    ]


# The site.


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(out)]
    return subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)


def test_the_site_is_built(tmp_path: Path) -> None:
    built = build(ROOT / "docs" / "mkdocs.yml", tmp_path / "site")
    assert built.returncode == 0, built.stderr
    assert 'id="train.lr"' in (tmp_path / "site/reference/options.html").read_text(encoding="utf-8")
    library = (tmp_path / "site/reference/library.html").read_text(encoding="utf-8")
    assert "Build all tables for segments in depth-first order" in library


def test_the_site_is_not_built_with_a_broken_link(tmp_path: Path) -> None:
    """To a page, a heading or an option that is not there."""
    for name in ("docs", "configs", "CHANGELOG.md"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    planted = ("nowhere.md", "design.md#nothing", "reference/options.md#train.nothing")
    with (tmp_path / "docs/guides/index.md").open("a", encoding="utf-8") as page:
        page.write("".join(f"\n[x]({link})\n" for link in planted))
    built = build(tmp_path / "docs/mkdocs.yml", tmp_path / "site")
    assert built.returncode == 1
    assert [link for link in planted if f"'{link}'" not in built.stderr] == []


# The tests of pages can fail.


def page_with(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    documents._tokens.cache_clear()
    return page


@pytest.mark.parametrize(
    ("check", "text", "said"),
    [
        (documents.wrong_links, "See [x](gone.md).", "page.md:1: gone.md does not exist"),
        (documents.wrong_links, "# Here\n\nSee [x](#there).", "page.md:3: page.md has no heading #there"),
        (documents.wrong_links, "![x](gone.svg)", "gone.svg does not exist"),
        (documents.wrong_files, "In `tests/numerics/test_gone.py`.", "tests/numerics/test_gone.py does not exist"),
        (documents.wrong_commands, "    prefix-train plam x.yaml\n", "prefix-train has no command plam"),
        (documents.wrong_commands, "    prefix-train plan x.yaml --jsn\n", "No such option: --jsn"),
        (documents.wrong_commands, "    prefix-train plan\n", "Missing argument"),
        (documents.wrong_commands, "    prefix-train verify RUN --examples none\n", "Invalid value"),
        (documents.wrong_commands, "    prefix-train plan x.yaml train.rl=1\n", "did you mean train.lr?"),
        (documents.wrong_commands, "    prefix-train plan x.yaml train.lr=fast\n", "train.lr"),
        (documents.wrong_commands, "    prefix-train plan x.yaml \\\n      train.rl=1\n", "did you mean train.lr?"),
        (documents.wrong_commands, "    cd x && python -m slurm.submit x.yaml --sweep train.rl=1,2\n", "train.rl"),
        (documents.wrong_commands, "    python -m slurm.sumbit x.yaml\n", "there is no module slurm.sumbit"),
        (documents.wrong_commands, "    python -m preflight ran\n", "python -m preflight has no command ran"),
        (documents.wrong_commands, "    srun -N 2 python -m preflight ran\n", "python -m preflight has no command ran"),
        (documents.wrong_commands, "```bash\nmake tests\n```\n", "make has no target tests"),
        (documents.wrong_commands, "```console\n$ make tests\nsome output\n```\n", "page.md:2: make tests"),
        (documents.wrong_commands, "    pip install 'prefix-train[gone]'\n", "there is no extra gone"),
        (documents.wrong_commands, "    pytest tests/gone -m 'not fast'\n", "there is no marker fast"),
        (documents.wrong_commands, "    frobnicate x\n", "frobnicate is not known here"),
        (documents.wrong_commands, "Run `prefix-train plan x --jsn`.", "No such option: --jsn"),
        (documents.wrong_commands, "Run `make gone`.", "make has no target gone"),
    ],
)
def test_a_planted_fault_is_found(check: Callable[[Path], list[str]], text: str, said: str, tmp_path: Path) -> None:
    found = check(page_with(tmp_path, text))
    assert len(found) >= 1
    assert said in "\n".join(found)


@pytest.mark.parametrize(
    ("language", "text", "note", "said"),
    [
        ("yaml", "train: {rl: 1}\n", "", "did you mean train.lr?"),
        ("yaml", "train:\n  updates: many\n", "", "train.updates"),
        ("yaml", "a: [\n", "", "not YAML"),
        ("yaml", "model: {path: x}\ndata: {heldout: x}\n", "", "give data.train"),
        ("yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_verison: 2}\n", "", "no option fsdp_verison"),
        ("json", '{"a": 1,}', "", "no JSON"),
        ("json", '{"messages": [{"role": "user", "content": "x"}]}', "", "assistant"),
        ("json", '{"input": "x", "taregt": "y"}', "", "target"),
        ("jsonl", '{"a": 1}\n{"a": \n', "", "no JSON"),
        ("python", "def\n", "", "invalid syntax"),
        ("python", "from prefix_train import Layuot\n", "", "Layuot"),
        ("python", "import prefix_trian\n", "", "prefix_trian"),
        ("python", "from prefix_train import Layout\nLayout.from_tree(length=[1], parents=[-1])\n", "", "no length"),
        ("text", "anything\n", "", "what printed it"),
        ("text", "\n", "verdict missing-sleep-backward", "says now"),
        ("text", "rank 1 did it\n", "verdict missing-sleep-backward", "says now"),
        ("text", "rank 1 did it\n", "verdict gone", "says now"),
        ("text", "PASS\n", "preflight one node imports another torch", "says now"),
        ("text", "anything\n", "from: prefix-train plam x", "no command plam"),
        ("toml", "a = 1\n", "", "no test knows the language toml"),
        ("", "a = 1\n", "", "no test knows the language"),
    ],
)
def test_a_planted_fault_in_a_block_is_found(language: str, text: str, note: str, said: str) -> None:
    assert said in "\n".join(documents_code.wrong_block(Block(Path("page.md"), 1, language, text, note)))


def test_a_link_to_a_page_that_only_the_site_has_is_a_fault(tmp_path: Path) -> None:
    """In a clone, and where a forge shows the folder, it leads nowhere."""
    (tmp_path / "guides").mkdir()
    page = page_with(tmp_path / "guides", "See [all options](reference/options.md).\n")
    assert documents.wrong_links(page) == [f"{page.name}:1: reference/options.md does not exist"]


def test_what_is_right_is_not_a_fault(tmp_path: Path) -> None:
    text = "# Here\n\n[x](#here)\n\n    . .venv/bin/activate && OMP_NUM_THREADS=1 make test | tail  # all\n"
    page = page_with(tmp_path, text)
    assert documents.wrong_links(page) == []
    assert documents.wrong_commands(page) == []
    fragment = Block(Path("page.md"), 1, "yaml", "slurm: {nodes: 2}\n")
    assert documents_code.wrong_block(fragment) == []
