"""`prefix-train compare`: runs each program at each size, keeps what they said, and puts it side by side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from configs.errors import UserError
from prefix_train.bench_rows import read, write
from prefix_train.compare.case import Case
from prefix_train.stream.bench import ALLOCATOR

RIVALS = {"ours": (), "peft": ("bitsandbytes", "peft"), "block-streamer": ("block_streamer",)}
"""Programs, and the modules that each needs besides what this package needs itself."""

SIZE = {"layers", "positions"}
"""Parts of a case in which rows of one file may differ."""

OPTIONS = {
    "geometry": "--geometry",
    "budget_gib": "--budget-gib",
    "folder": "--stores",
    "warm": "--warm",
    "overrides": "list of changes",
}
"""The other parts, as the command line calls them."""

DEADLINE_S = 240.0
"""Of one program at one size."""


def require(rivals: Sequence[str], packages: Path | None) -> None:
    """Raise UserError for a program that is unknown, and for one that is not installed."""
    for name in rivals:
        if name not in RIVALS:
            raise UserError(f"--rival {name}: programs are {', '.join(RIVALS)}")
    for name in rivals:
        for module in RIVALS[name]:
            if not _installed(module, packages):
                raise UserError(
                    f"--rival {name}: {module} is not installed; `pip install --no-deps --target FOLDER "
                    f"{module.replace('_', '-')}` and --packages FOLDER give it to that program alone"
                )


def _installed(module: str, packages: Path | None) -> bool:
    from importlib.machinery import PathFinder

    return PathFinder.find_spec(module, [*([str(packages)] if packages else []), *sys.path]) is not None


def compare(
    cases: Sequence[Case],
    rivals: Sequence[str],
    out: Path,
    packages: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run `rivals` at each size, each in a process of its own, and write to `out` what there is at once.

    packages: a folder that is put in front of the module path of the others' processes. Rows of `out` that are not run
    again stay, and so do differences that are not measured again. Raises UserError for programs that are not there and
    for an `out` with another case.
    """
    require(rivals, packages)
    found = read(out)
    for case in cases:
        require_same(found["rows"], case, out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f"{out.stem}.gradients.", dir=out.parent) as kept:
        folder = Path(kept)
        for case in cases:
            case.store()
            for name in rivals:
                say(f"{case.name} {name} ...")
                row = run(name, case, folder / f"{case.name}-{name}.safetensors", packages)
                add(found, row, folder)
                write(out, found)
                say(f"{case.name} {name}: " + (failed(row) or f"{row['median_s']:.3f} s"))
    return found


def require_same(rows: Sequence[dict[str, Any]], case: Case, out: Path) -> None:
    """Raise UserError where a row of `out` is of a case that differs in more than its size."""
    mine = asdict(case) | {"overrides": list(case.overrides)}  # as JSON has it
    for row in rows:
        for name in mine.keys() - SIZE:
            if (theirs := row.get("case", {}).get(name)) != mine[name]:
                raise UserError(
                    f"--out {out} holds rows with another {OPTIONS[name]}: {_shown(theirs)} there, "
                    f"{_shown(mine[name])} now; give another file"
                )


def _shown(value: Any) -> str:
    return (" ".join(value) or "none") if isinstance(value, list) else str(value)


def add(found: dict[str, Any], row: dict[str, Any], folder: Path) -> None:
    """Put a row in the place of the same one, and what is now known of differences in the place of what was."""
    size, name = row["size"], row["rival"]
    found["rows"] = [old for old in found["rows"] if (old["rival"], old["size"]) != (name, size)] + [row]
    known = found.setdefault("differences", {})
    if "failed" in row:
        known.get(size, {}).pop(name, None)
    for measured, apart in differences(found["rows"], folder).items():
        known.setdefault(measured, {}).update(apart)


def run(name: str, case: Case, gradients: Path, packages: Path | None) -> dict[str, Any]:
    """What the process of one program says; that it ended without a word, if so."""
    told = {"rival": name, "case": asdict(case), "gradients": str(gradients)}
    paths = [str(packages.resolve())] if packages and name != "ours" else []  # peft imports bitsandbytes if it can
    environment = {
        **os.environ,
        "PYTORCH_ALLOC_CONF": os.environ.get("PYTORCH_ALLOC_CONF", ALLOCATOR),
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    gradients.unlink(missing_ok=True)
    program = [sys.executable, "-m", "prefix_train.compare.worker", json.dumps(told)]
    row: dict[str, Any] = {"rival": name, "size": case.name, "case": asdict(case), "budget_gib": case.budget_gib}
    try:
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return row | {"failed": {"message": f"it took more than {DEADLINE_S:.0f} s", "out_of_memory": False}}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = done.stderr.strip().splitlines()[-1:] or ["no word"]
        return row | {"failed": {"message": f"exit status {done.returncode}: {last[0]}", "out_of_memory": False}}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def differences(rows: Sequence[dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """By size: how far others' gradients of the first update are from ours, of all tensors together and of the worst.

    Raises RuntimeError where two programs do not train the same tensors.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        ours, theirs = (folder / f"{row['size']}-{name}.safetensors" for name in ("ours", row["rival"]))
        if row["rival"] == "ours" or not (ours.is_file() and theirs.is_file()):
            continue
        mine, other = load_file(ours), load_file(theirs)
        if mine.keys() != other.keys():
            raise RuntimeError(f"{row['rival']} trains other tensors: {sorted(mine.keys() ^ other.keys())[:3]}")
        apart = {name: (mine[name] - other[name]).double().norm() for name in mine}
        whole = {name: mine[name].double().norm() for name in mine}
        total = torch.stack(list(apart.values())).norm() / torch.stack(list(whole.values())).norm()
        worst = max(mine, key=lambda name: float(apart[name] / whole[name].clamp_min(1e-30)))
        found.setdefault(row["size"], {})[row["rival"]] = {
            "all": float(total),
            "worst": float(apart[worst] / whole[worst].clamp_min(1e-30)),
            "worst_tensor": worst,
        }
    return found


def failed(row: dict[str, Any]) -> str | None:
    """Why a row has no figures; none where it has."""
    if "failed" not in row:
        return None
    said = row["failed"]
    where = f" in {said['where'][-1]}" if said.get("where") else ""
    return f"{'out of memory' if said['out_of_memory'] else 'failed'}: {said['message']}{where}"


def text(found: dict[str, Any]) -> str:
    """The table as Markdown, with the reason below where a program gave no figures."""
    lines = [
        "| layers x positions | program | s per update | positions/s | first s | peak GiB | budget GiB | GB read | "
        "GB/s | gradients differ from ours (all, worst) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    reasons = []
    for row in sorted(found["rows"], key=lambda row: [int(part) for part in row["size"].split("x")]):
        start = f"| {row['size']} | {row['rival']} | "
        if reason := failed(row):
            what = "out of memory" if row["failed"]["out_of_memory"] else "failed"
            lines.append(start + f"{what} | - | - | - | {row['budget_gib']:g} | - | - | - |")
            reasons.append(f"{row['size']} {row['rival']}: {reason}")
            continue
        apart = found.get("differences", {}).get(row["size"], {}).get(row["rival"])
        lines.append(
            start + f"{row['median_s']:.3f} | {row['positions_per_s']:,.0f} | {row['first_s']:.2f} | "
            f"{row['memory']['peak_gib']:.2f} | {row['budget_gib']:g}{'' if row['budget_enforced'] else ' (not held)'} "
            f"| {row['read_bytes'] / 1e9:.2f} | {row['read_gb_s']:.2f} | "
            + (f"{apart['all']:.1e}, {apart['worst']:.1e} |" if apart else "- |")
        )
    return "\n".join([*lines, *reasons])


def sizes(given: Sequence[str], case: Case) -> list[Case]:
    """`LAYERSxPOSITIONS` as cases. UserError for what is none."""
    cases = []
    for size in given:
        layers, cross, positions = size.partition("x")
        if not (cross and layers.isdecimal() and positions.isdecimal() and int(layers) and int(positions) > 3):
            raise UserError(f"--size {size}: write LAYERSxPOSITIONS, as in 4x512, with at least 4 positions")
        cases.append(replace(case, layers=int(layers), positions=int(positions)))
    return cases
