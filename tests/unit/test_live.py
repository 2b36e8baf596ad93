"""slurm/live.py: what a local run shows."""

from __future__ import annotations

import io
from pathlib import Path

from slurm.live import Follower, Live


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_whole_lines_once_each_from_where_it_began(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("of an earlier life\n")
    follower = Follower(path)
    with path.open("a") as stream:
        stream.write("one\ntw")
    assert follower.lines() == ["one"]
    assert follower.lines() == []
    with path.open("ab") as stream:
        stream.write(b"o \xff\nlast")
    assert follower.lines() == ["two \ufffd"]
    assert follower.lines(rest=True) == ["last"]
    assert Follower(tmp_path / "none").lines(rest=True) == []


def fill(run: Path, updates: int) -> None:
    (run / "logs").mkdir(exist_ok=True)
    with (run / "logs" / "rank0.log").open("a") as stream:
        stream.write(f"a [line]\nupdate {updates}/9  loss 1.0\n")
    with (run / "metrics.jsonl").open("a") as stream:
        for update in range(1, updates + 1):
            stream.write(f'{{"update": {update}, "loss": 1.0, "logical_tokens_per_s": 1234.5}}\n')
        stream.write('{"update": 9, "heldout_loss": 2.0}\n')


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    stream = io.StringIO()
    live = Live(tmp_path, None, stream)
    fill(tmp_path, 3)
    live.show(rest=True)
    live.close()
    assert stream.getvalue() == "a [line]\nupdate 3/9  loss 1.0\n"


def test_bar_on_a_terminal(tmp_path: Path) -> None:
    stream = Terminal()
    live = Live(tmp_path, None, stream)
    live.show()
    fill(tmp_path, 3)
    live.show()
    live.close()
    shown = stream.getvalue()
    assert "a [line]" in shown
    assert "update 3/9  loss" not in shown
    assert "3/9" in shown
    assert "loss 1.0000" in shown
