"""The demonstration's data: whole, the same on every run, and what the instructions promise."""

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from configs import compose, runfolder
from configs.errors import UserError
from prefix_train import digits, tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    assert digits.write_digits(folder) == {"train.jsonl": 1499, "heldout.jsonl": 297}
    return folder


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def asked(row):
    """Index of the scan that a row asks about."""
    return int(Path(row["messages"][-2]["content"][0]["image"]).stem)


def tree(folder):
    """Digest of each file below `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_every_run_writes_the_same_bytes(folder, tmp_path):
    digits.write_digits(tmp_path)
    assert tree(tmp_path) == tree(folder)
    assert len(tree(folder)) == 1797 + 2


def test_a_second_run_touches_nothing(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    digits.write_digits(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_images_are_the_scans(folder):
    scans = load_digits().images
    for index in (0, 7, 1796):
        with Image.open(folder / f"images/{index:04d}.png") as image:
            assert (image.size, image.mode) == ((32, 32), "L")
            grey = np.asarray(image, dtype=float)
        cells = grey.reshape(8, 4, 8, 4).mean((1, 3)) / 255 * 16
        assert np.corrcoef(cells.ravel(), scans[index].ravel())[0, 1] > 0.97


def test_splits_share_no_scan_and_leave_out_the_worked_example(folder):
    train, heldout = [{asked(row) for row in rows(folder / name)} for name in (digits.TRAIN, digits.HELDOUT)]
    assert (len(train), len(heldout)) == (1499, 297)
    assert train.isdisjoint(heldout)
    assert train | heldout == set(range(1797)) - {digits.WORKED_EXAMPLE}


def test_answers_are_those_of_the_labels(folder):
    labels = load_digits().target
    for row in rows(folder / digits.HELDOUT) + rows(folder / digits.TRAIN):
        digit = int(labels[asked(row)])
        word = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"][digit]
        expected = {
            "register": {"digit": digit, "parity": ["even", "odd"][digit % 2]},
            "survey": {"word": word, "closed_loop": digit in (0, 6, 8, 9)},
        }
        assert json.loads(row["messages"][-1]["content"]) == expected[row["id"].split("-")[0]]


def test_both_instructions_are_asked_in_turn_and_share_their_beginnings(folder):
    for name in (digits.TRAIN, digits.HELDOUT):
        found = rows(folder / name)
        register, survey = found[::2], found[1::2]
        assert {row["id"].split("-")[0] for row in register} == {"register"}
        assert {row["id"].split("-")[0] for row in survey} == {"survey"}
        assert all(row["messages"][:-2] == register[0]["messages"][:-2] for row in register)
        assert all(row["messages"][:-2] == survey[0]["messages"][:-2] for row in survey)
        assert len({row["id"] for row in found}) == len(found)
    worked = survey[0]["messages"][1:3]
    assert worked[0]["content"][0]["image"] == f"images/{digits.WORKED_EXAMPLE:04d}.png"
    assert json.loads(worked[1]["content"]) == {"word": "seven", "closed_loop": False}
    assert load_digits().target[digits.WORKED_EXAMPLE] == 7


@pytest.mark.parametrize(("start", "tokens"), [(0, 1500), (1, 950)])
def test_lengths_are_as_documented(folder, start, tokens):
    processor = tiny.build_processor()
    first, second = rows(folder / digits.HELDOUT)[start : start + 3 : 2]
    instruction = processor.tokenizer(first["messages"][0]["content"]).input_ids
    assert abs(len(instruction) - tokens) < 50
    for row in (first, second):
        answer = processor.tokenizer(row["messages"][-1]["content"] + "<|im_end|>").input_ids
        assert len(answer) == 13
    prompts = [processor.apply_chat_template(row["messages"][:-1]) for row in (first, second)]
    assert prompts[0] == prompts[1]
    with Image.open(folder / first["messages"][-2]["content"][0]["image"]) as image:
        assert processor.image_processor(image)["image_grid_thw"].tolist() == [[1, 4, 4]]


def test_the_demonstrations_run_says_what_is_so(folder):
    """What the comments of configs/digits.yaml claim about sizes."""
    config = compose.load(Path(__file__).parents[2] / "configs/digits.yaml")
    assert (config.ranks, config.data.prepare, config.train.trainable) == (2, "digits", "all")
    model = tiny.build_model(config.model.build, config.model.seed)
    kinds = model.config.text_config.layer_types
    assert (kinds.count("linear_attention"), kinds.count("full_attention")) == (6, 2)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == 1.2
    processor = tiny.build_processor(model.config)
    found = rows(folder / digits.HELDOUT)
    for (first, second), prefix, members in (((found[0], found[2]), 1531, 49), ((found[1], found[3]), 982, 72)):
        ids = []
        for row in (first, second):
            text = processor.apply_chat_template(row["messages"])
            ids.append(processor.tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * 4)).input_ids)
        # The prefix ends before the item's own image; what follows is the image, the frame and the answer.
        image = len(ids[0]) - ids[0][::-1].index(processor.image_token_id) - 4
        assert image == prefix
        assert {len(ids[0]), len(ids[1])} == {prefix + 24}
        assert prefix + members * 24 <= config.pack.max_positions < prefix + (members + 1) * 24
    assert config.evaluate.max_new_tokens >= 13


def test_instructions_show_answers_as_the_data_has_them(folder):
    """Every line of the instructions that begins with `Right:` or ends with an answer must be a possible target."""
    for name, answer in (("register", digits._register), ("survey", digits._survey)):
        possible = {answer(digit) for digit in range(10)}
        lines = digits._instruction(name).splitlines()
        shown = [line[line.index("{") :] for line in lines if line.endswith("}") and not line.startswith("Wrong")]
        assert len(shown) >= 3
        assert set(shown) <= possible


def test_an_interrupted_run_is_completed(folder, tmp_path, monkeypatch):
    """Stopped after each kind of file in turn: train.jsonl is never there before all else is."""
    put = digits._put
    for stop in ("images/0900.png", digits.HELDOUT, digits.TRAIN):

        def fail(path, content, stop=stop):
            if str(path).endswith(stop):
                raise KeyboardInterrupt
            put(path, content)

        monkeypatch.setattr(digits, "_put", fail)
        with pytest.raises(KeyboardInterrupt):
            digits.write_digits(tmp_path)
        assert not (tmp_path / digits.TRAIN).exists()
    monkeypatch.setattr(digits, "_put", put)
    digits.write_digits(tmp_path)
    assert tree(tmp_path) == tree(folder)


def test_a_killed_run_is_completed(folder, tmp_path):
    """kill -9 in the middle of the images; what it leaves are whole files and temporary ones."""
    program = "import sys, pathlib; from prefix_train import digits; digits.write_digits(pathlib.Path(sys.argv[1]))"
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parents[2])
    while process.poll() is None and len(list(tmp_path.glob("images/*.png"))) < 100:
        pass
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / digits.TRAIN).exists()
    digits.write_digits(tmp_path)
    assert tree(folder).items() <= tree(tmp_path).items()


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl", "images/0003.png"])
def test_a_file_of_another_origin_is_never_overwritten(tmp_path, name):
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(UserError, match=f"{name} is not what the demonstration writes"):
        digits.write_digits(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == "mine"


def test_files_are_written_aside(folder, tmp_path, monkeypatch):
    """All writing goes through the run folder's only way to write."""
    written = []
    monkeypatch.setattr(runfolder, "write_aside", lambda path, fill: written.append(path))
    digits.write_digits(tmp_path)
    assert written[-2:] == [tmp_path / digits.HELDOUT, tmp_path / digits.TRAIN]
    assert len(written) == 1799
    assert not list(tmp_path.iterdir())
