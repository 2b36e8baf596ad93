"""What the commands leave unsaid: advice of other packages that is none here, and bars in files."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.documents import ROOT

LOUD = ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS")
LOOK = """
import sys
from prefix_train import cli
if {quiet}:
    cli.be_quiet()
from transformers.utils import logging
logging.get_logger("transformers.any").warning("falls back to torch")
for _ in logging.tqdm(range(2), desc="Loading weights"):
    pass
"""


def said(quiet: bool, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name not in LOUD}
    command = [sys.executable, "-c", LOOK.format(quiet=quiet)]
    done = subprocess.run(
        command, cwd=ROOT, env=inherited | environment, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stderr


def test_commands_print_no_advice_of_other_packages_and_no_bars_into_a_file() -> None:
    assert said(quiet=True) == ""
    loud = said(quiet=False)
    assert "falls back to torch" in loud
    assert "Loading weights" in loud


def test_who_asks_for_more_gets_it() -> None:
    assert "falls back to torch" in said(quiet=True, TRANSFORMERS_VERBOSITY="warning")


def test_the_command_is_quiet() -> None:
    code = (
        "import os, sys; from prefix_train import cli; cli.run = lambda app: None; cli.main(); print(os.environ['%s'])"
    )
    done = subprocess.run([sys.executable, "-c", code % LOUD[0]], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == os.environ.get(LOUD[0], "error")
