"""slurm/archive.py: what goes into the file for a colleague, and what never does."""

from __future__ import annotations

import errno
import json
import tarfile
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.redact import MASK, redact, redact_json
from slurm import archive

SECRETS = [
    "hf_" + "aB3" * 12,
    "ghp_" + "x9Y" * 12,
    "github_pat_" + "A1b2" * 8,
    "sk-" + "proj-abcDEF123456789xyz",
    "AKIA" + "ABCDEFGH12345678",
    "0123456789abcdef" * 2 + "01234567",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNza\n-----END OPENSSH PRIVATE KEY-----",
]
NAMED = [
    ("WANDB_API_KEY=localkey1234", "localkey1234"),
    ('"hub_token": "plainword99"', "plainword99"),
    ("password: correct-horse", "correct-horse"),
    ("Authorization: Bearer abcdefgh.ijkl", "abcdefgh.ijkl"),
    ("aws_secret_access_key = AbCdEfGh", "AbCdEfGh"),
    ("DB_PWD=a,b c9", "c9"),
    ("WANDB_KEY: 12", "12"),
    ("X-Auth is ,x y7", "y7"),
    ("run --password hunter2", "hunter2"),
    ("https://user9@host", "user9"),
    ("https://user:pa55word@host/path", "pa55word"),
    ("redis://:pa55word@host", "pa55word"),
    ("see hf_shortAbc123 there", "shortAbc123"),
    ('password: "correct horse battery staple"', "battery"),
    ("cookie: session=abc; path=/", "session"),
    ("passphrase: two words", "two"),
    ("\x1b[36mWANDB_API_KEY\x1b[0m=localkey1234", "localkey1234"),
    ("WANDB_API_KEY\tlocalkey1234", "localkey1234"),
    ("WANDB_API_KEY -> localkey1234", "localkey1234"),
    ("https://bucket/file?X-Amz-Expires=60&X-Amz-Signature=0a1b2c", "0a1b2c"),
    ("https://account/file?sv=2026&sig=0a1b%3D", "0a1b"),
    ("https://hooks.slack.com/services/T0/B0/word", "word"),
]
KEPT = [
    "PASS: 2 node(s)",
    "update 7/20  loss 0.1234  1,234 logical tokens/s",
    "max_example_tokens: 4096",
    "special_tokens: [a, b]",
    "the plan with sha256 886c0caff5dacca3886c0caff5dacca3886c0caff5dacca3886c0caff5dacca3",
    "/scratch/runs/Some-Long-Name-2031/code/prefix_train/checkpoint_of_a_run.py:132",
    "token: null",
    "logical_tokens: 123",
    "tokens per second: 5",
    "tokenizer.json: missing",
    "author: Me",
    "signature: (hidden_states, attention_mask)",
    "https://host/page?update=7&signal=9",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_what_looks_like_a_key_is_masked(secret: str) -> None:
    assert secret not in redact(f"before {secret} after")
    assert redact(f"before {secret} after") == "before *** after"


@pytest.mark.parametrize(("line", "secret"), NAMED)
def test_what_is_named_as_a_secret_is_masked(line: str, secret: str) -> None:
    assert secret not in redact(line)
    assert MASK in redact(line)


def test_what_stands_below_a_secrets_name_goes_with_it() -> None:
    assert redact("password:\n  hunter2 below\nname: x") == "password:\nname: x"


@pytest.mark.parametrize("line", KEPT)
def test_what_explains_a_failure_stays(line: str) -> None:
    assert redact(line) == line


def test_json_stays_json() -> None:
    text = json.dumps({"name": "run", "hub_token": "abc", "argv": ["x", "--password", "pw"], "max_tokens": 7, "n": 1.5})
    found = json.loads(redact_json(text))
    assert found == {"name": "run", "hub_token": MASK, "argv": ["x", "--password", MASK], "max_tokens": 7, "n": 1.5}


def test_names_in_an_archive_of_the_folder_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("name: x\n")
    monkeypatch.chdir(tmp_path / "run")
    archive.write(Path("."), tmp_path / "out.tar.gz", "the diagnosis\n")
    with tarfile.open(tmp_path / "out.tar.gz") as tar:
        assert sorted(tar.getnames()) == ["run/config.yaml", "run/diagnosis.txt"]


def test_an_archive_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archive, "_add", fail)
    with pytest.raises(UserError, match="no archive was written"):
        archive.write(tmp_path / "run", tmp_path / "out.tar.gz", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_only_what_is_listed_goes_in(tmp_path: Path) -> None:
    run = tmp_path / "a run'é"
    for name in (
        "config.yaml", "plan.json", "heartbeat/rank0.json", "logs/rank0.log", "logs/rank0.json", "hangs/1/verdict.txt",
        "hangs/1/evidence/0-node1.json", "preflight/0/report.txt", "code/slurm/x.py",
        "checkpoints/update-1/model.safetensors", "submitit/1_submitted.pkl", "data.jsonl", "seen/rank0.json",
        ".env", "submit.sh",
    ):  # fmt: skip
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(f"{name} {SECRETS[0]}")
    secret = tmp_path / "secret"
    secret.write_text("elsewhere")
    (run / "logs" / "rank1.log").symlink_to(secret)
    (run / "logs" / "rank2.log").write_text("first\n" + "x" * 79 * (1 << 14) + "\nlast\n")
    (run / "logs" / "rank3.log").hardlink_to(secret)
    names, links = archive.write(run, tmp_path / "out.tar.gz", "the diagnosis\n")
    assert links == ["logs/rank1.log", "logs/rank3.log"]
    assert (tmp_path / "out.tar.gz").stat().st_mode & 0o777 == 0o600
    with tarfile.open(tmp_path / "out.tar.gz") as tar:
        texts = {entry.name: tar.extractfile(entry).read().decode() for entry in tar}  # type: ignore[union-attr]
    assert set(texts) == {f"{run.name}/{name}" for name in names}
    assert set(names) == {
        "diagnosis.txt", "config.yaml", "plan.json", "heartbeat/rank0.json", "logs/rank0.log", "logs/rank0.json",
        "logs/rank2.log", "hangs/1/verdict.txt", "hangs/1/evidence/0-node1.json", "preflight/0/report.txt",
    }  # fmt: skip
    assert not any(SECRETS[0] in text or "elsewhere" in text for text in texts.values())
    assert texts[f"{run.name}/logs/rank2.log"].startswith("... the first ")
    assert texts[f"{run.name}/logs/rank2.log"].endswith("last\n")
    assert "code/slurm/x.py" in archive.write(run, tmp_path / "code.tar.gz", "", with_code=True)[0]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("name", ["run/config.yaml", "run/new.tar.gz", "there", "no/x.tar.gz", "", "link/new.tar.gz"])
def test_an_archive_overwrites_nothing_and_stays_out_of_the_run(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("mine")
    (tmp_path / "there").write_text("mine")
    (tmp_path / "link").symlink_to(run)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="--archive"):
        archive.write(run, tmp_path / name, "")
    assert sorted(tmp_path.rglob("*")) == before
    assert (run / "config.yaml").read_text() == (tmp_path / "there").read_text() == "mine"
