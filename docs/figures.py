"""Writes the figures of README.md from the JSON files that measurements left in tests/bench/results/."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "bench" / "results"
BEGIN, END = "<!-- figures:begin", "<!-- figures:end -->"


def read(name: str) -> dict[str, Any]:
    """One committed measurement."""
    document: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return document


def rows(demo: dict[str, Any], cpu: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, figure) of each row."""
    check, differences, shape = demo["verify"], demo["verify"]["differences"], cpu["shape"]
    positions, logical = demo["positions"], demo["logical_tokens"]
    pack = f"{shape['prefix']:,} + {shape['continuations']} x {shape['continuation_tokens']} tokens"
    packed, alone = cpu["packed"]["median_s"], cpu["standalone"]["median_s"]
    return [
        (
            "held-out digits answered exactly",
            f"{demo['accuracy']:.1%} of {demo['heldout_examples']} (chance {demo['chance']:.0%})",
        ),
        ("positions computed", f"{positions:,} for {logical:,} logical tokens: {logical / positions:.1f} times fewer"),
        ("training, two ranks on two cores", f"{demo['updates']} updates in {demo['seconds']:.0f} s"),
        (
            "against transformers' own model, trained weights, float32",
            f"mean loss differs by {differences['mean_loss']:.0e}, the worst of {check['tensors']} gradient tensors by "
            f"{differences['gradient']:.0e} of its norm",
        ),
        (
            f"update of one pack of {pack}, one core",
            f"{packed:.2f} s; the same examples alone {alone:.1f} s: {cpu['ratio']:.1f} times longer",
        ),
        ("memory of an update with 4 times the continuations", f"{cpu['update_bytes_growth']:.2f} times as much"),
    ]


def _is_whole(row: dict[str, Any]) -> bool:
    return row["row"] == "packed" and row["case"]["layers"] is None and not row.get("partial")


def gpu_rows(pack: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, figure) of the newest whole row of the pack on a GPU, and of the newest ratio to FlexAttention."""
    whole = [row for row in pack["rows"] if _is_whole(row)]
    row, flex = whole[-1], [ratio for ratio in pack["ratios"] if "flex" in ratio][-1]
    case, memory, used = row["case"], row["memory"], row["model_utilisation"]
    shape = f"{case['prefix']:,} + {case['continuations']} x {case['length']:,} tokens"
    return [
        (
            f"update of one pack of {shape}, all layers of {case['geometry']}, random weights, LoRA, "
            f"one {row['device']}",
            f"{row['median_s']:.1f} s; {used:.0%} of {case['peak_tflops']:.0f} TFLOP/s in model FLOPs",
        ),
        (
            "its memory, layer inputs and kept attention on the host",
            f"{memory['above_weights_gib']:.1f} GiB above {memory['weights_gib']:.1f} GiB of weights; "
            f"{memory['pinned_gib']:.0f} GiB pinned; {memory['copying_hidden']:.2%} of the copying behind computing",
        ),
        (
            f"with FlexAttention in place of the merged kernels, {flex['case']['layers']} layers",
            f"{flex['flex']:.2f} times as long",
        ),
    ]


def table(demo: dict[str, Any], cpu: dict[str, Any], pack: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = ["| measured by `make demo`, `make bench-cpu` and `prefix-train bench pack` | |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {what} | {figure} |" for what, figure in [*rows(demo, cpu), *gpu_rows(pack)])])


def smollm_table(found: dict[str, Any]) -> str:
    """A pretrained model trained on packs, and on the same examples alone, as Markdown: means over the seeds."""
    packs, alone = ([run for run in found["runs"] if run["side"] == side] for side in ("packs", "alone"))
    seeds = "" if len(packs) == 1 else f", mean of {len(packs)} seeds (and their range)"
    threads = "" if found["threads"] is None else f", {found['threads']} thread{'s' * (found['threads'] > 1)}"

    def cell(runs: list[dict[str, Any]], key: str, form: str) -> str:
        values = [run[key] for run in runs]
        spread = "" if len(values) == 1 else f" ({min(values):{form}} to {max(values):{form}})"
        return f"{fmean(values):{form}}{spread}"

    where = f"{found['device']}{threads}, {found['dtype']}{seeds}"
    rows = [
        (f"`make smollm`: SmolLM2-135M, pretrained, judges biopsies; {where}", "in packs", "each example alone"),
        ("---", "---", "---"),
        (
            f"{found['heldout_examples']} held out, answered exactly; before training {found['before']['exact']:.0%}, "
            f"always the commoner answer {found['chance']:.0%}",
            cell(packs, "exact", ".1%"),
            cell(alone, "exact", ".1%"),
        ),
        ("their loss", cell(packs, "loss", ".4f"), cell(alone, "loss", ".4f")),
        (
            f"seconds of {found['updates']} updates of {found['examples']} examples: {found['prefix']:,} tokens that "
            f"they share, and {found['continuation']:.0f} each",
            cell(packs, "seconds", ".1f"),
            cell(alone, "seconds", ".1f"),
        ),
        ("positions computed", f"{packs[0]['positions']:,}", f"{alone[0]['positions']:,}"),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def smollm() -> list[str]:
    """A table for every measurement of `make smollm` that is there, on a CPU and on GPUs."""
    found = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("smollm*.json")))
    return [smollm_table(document) for document in found]


def with_figures(readme: str) -> str:
    """`readme` with what stands between the marks written anew."""
    head, rest = readme.split(BEGIN, 1)
    mark, rest = rest.split("\n", 1)
    figures = table(read("demo.json"), read("cpu.json"), read("pack.json"))
    figures = "\n\n".join([figures, *smollm()])
    return f"{head}{BEGIN}{mark}\n{figures}\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    path.write_text(with_figures(old), encoding="utf-8")
    sys.exit(0)
