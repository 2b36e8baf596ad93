"""Masks what looks like a secret in the text of a run folder: by the name before it, or by its looks.

Rather a harmless value masked than a secret left. What explains a failure stays: counts of tokens, places in files.
"""

from __future__ import annotations

import json
import re
from typing import Any

MASK = "***"

ANYWHERE = (
    *("password", "passwd", "passphrase", "secret", "credential", "apikey", "accesskey", "privatekey"),
    "authorization",
)
"""In a name, with or without separators before and after."""
WORDS = frozenset({"pass", "pwd", "auth", "oauth", "xauth", "cookie", "cookies", "setcookie"})
"""Words of a name; those that end with `pwd` or `pass` too."""
NOT_PASS = frozenset({"bypass", "compass", "surpass"})
NOTHING = frozenset({"null", "none", "true", "false", "~"})
"""Values that are no secret, whatever the name before them."""

SETTING = re.compile(
    r"""(?ix) (?<![\w.-]) (?P<name> (?:(?:api|access|private|secret)[ ])? [\w.-]++ )
        (?: (?P<quote>["']?) \]? [ \t]* (?:[:=]+>?|->|\t|(?<=[ \t])(?:is|was)(?=[ \t])) [ \t]*
          | (?<=[\w.-]) (?:["'],?\s*(?=["']) | [ \t]+(?![ \t:=]|is[ \t]|was[ \t])) (?P<option>) )"""
)
"""A name and what stands between it and its value; `option`: nothing but space or the quotes of a list."""
QUOTED = re.compile(r"""(?x) (?: "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' ) (?=[\s,;:)}\]]|\Z)""")
FIRST = re.compile(r"[ \t]*(?:-[ \t]+)?")
"""What may stand before the first name of a line."""
HEADLINE = re.compile(r"PASS: \d+ node\(s\)")
"""How preflight's report begins."""
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

SHAPED = re.compile(
    r"""(?x) -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----.*?(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
        | (?<![A-Za-z0-9]) (?:
            hf_(?!(?:transfer|tokenizer|processor|quantizer)\b)(?:(?=[A-Za-z]*\d)[A-Za-z0-9]{5,}|[A-Za-z0-9]{8,})
          | gh[pousr]_[A-Za-z0-9]{4,} | github_pat_\w{4,} | glpat-[\w-]{4,} | (?:npm|pypi)[_-][A-Za-z0-9_-]{16,}
          | sk-(?!learn\b)[A-Za-z0-9_-]{5,} | xox[a-z]-[A-Za-z0-9-]{3,}
          | (?:AKIA|ASIA)[A-Z0-9]{4,} | AIza[\w-]{8,} | eyJ[\w-]{5,}(?:\.[\w-]*){0,2} )
        | (?<=hooks\.slack\.com/services/)[\w/]+
        | (?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])
        | (?<=://)[^\s/"]{1,500}(?=@) | (?<=://)[^\s/:@"]{0,99}:(?!\d+/)[^\s@"]{0,500}(?=@)""",
    re.DOTALL,
)
"""What is a key by its looks: of known services, private keys, 40 hexadecimal digits, who asks within an address."""
SIGNED = re.compile(r"(?i)([?&](?:sig|(?:x-(?:amz|goog)-)?(?:signature|credential|security-token))=)[^\s&\"']+")
"""Addresses that open by themselves what they lead to."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""A terminal's; it would stand between a name and its value."""
BEARER = re.compile(r"(?i)(\bbearer\s+)[\w.~+/-]{8,}=*")
MIXED = re.compile(
    r"(?<![\w/+.-])(?=[A-Za-z0-9+_-]*[a-z])(?=[A-Za-z0-9+_-]*[A-Z])(?=[A-Za-z0-9+_-]*\d)[A-Za-z0-9+_-]{40,}+={0,2}"
)
"""A long run of mixed letters and digits that is no path."""


def is_secret(name: str) -> bool:
    """Whether what `name` names is a secret. `token` and `key` count as the last word of a name: `token_count` is none.

    A bare `key` and the name of a source file are none.
    """
    if name.lower().endswith(".py"):
        return False
    if any(part in re.sub(r"[\W_]", "", name.lower()) for part in ANYWHERE):
        return True
    words = [word.lower() for word in WORD.findall(name)]
    if any(word in WORDS or (word.endswith(("pwd", "pass")) and word not in NOT_PASS) for word in words):
        return True
    return bool(words) and (words[-1].endswith("token") or (words[-1] == "key" and len(words) > 1))


def redact(text: str) -> str:
    """`text` with all that looks like a secret masked: a named value to its closing quote or the end of its line.

    Lines that go on a value, indented deeper than its name, are left out.
    """
    text = SIGNED.sub(rf"\1{MASK}", BEARER.sub(rf"\1{MASK}", SHAPED.sub(MASK, COLOUR.sub("", text))))
    kept: list[str] = []
    inside: int | None = None
    for line in text.split("\n"):
        if inside is not None and (not line.strip() or _indent(line) > inside):
            continue
        masked, goes_on = _redact_line(line)
        inside = _indent(line) if goes_on else None
        kept.append(masked)
    return MIXED.sub(MASK, "\n".join(kept))


def redact_json(text: str) -> str:
    """The same of a JSON document, which stays one; text that is none is treated as text."""
    try:
        document = json.loads(text)
    except ValueError:
        return redact(text)
    return json.dumps(redact_value(document), indent=1, ensure_ascii=False) + "\n"


def redact_value(value: Any, named: bool = False) -> Any:
    """The same of a document of built-in types. named: whether a secret's name stands before it."""
    if isinstance(value, dict):
        return {redact(name): redact_value(item, named or is_secret(name)) for name, item in value.items()}
    if isinstance(value, list):
        after = [None, *value]
        options = [isinstance(one, str) and one.startswith("-") and is_secret(one) for one in after]
        return [redact_value(item, named or option) for item, option in zip(value, options, strict=False)]
    if named:
        return value if value is None or isinstance(value, bool) else MASK
    return redact(value) if isinstance(value, str) else value


def _redact_line(line: str) -> tuple[str, bool]:
    """The line, and whether the lines below may go on its value."""
    done, start = [], 0
    while (found := _next_secret(line, start)) is not None:
        value = found.end()
        done.append(line[start:value])
        rest = line[value:]
        if rest.strip(" \t\r,;)}]\"'").lower() in NOTHING:
            return "".join(done) + rest, False
        quoted = QUOTED.match(rest)
        if quoted is None:
            first = FIRST.match(line)
            goes_on = first is not None and found.start("name") - first.end() in (0, 1) and found["option"] is None
            return "".join(done) + (MASK if rest.strip() else rest), goes_on
        done.append(rest[0] + MASK + rest[0])
        start = value + quoted.end()
    return "".join(done) + line[start:], False


def _next_secret(line: str, start: int) -> re.Match[str] | None:
    """The next name of a secret from `start` on, up to its value."""
    for found in SETTING.finditer(line, start):
        name = found["name"]
        if found["option"] is not None and not name.startswith("-"):
            continue
        if is_secret(name) and not HEADLINE.match(line, found.start("name")):
            return found
    return None


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))
