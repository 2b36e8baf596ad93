"""The command `prefix-train`: reads arguments, calls one function, prints. Each command imports what it needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from configs import runfolder
from configs.console import make_app, run
from configs.errors import UserError
from configs.schema import Config
from configs.wording import counted
from prefix_train.arguments import Json, Overrides, RunFolder, Where, answer, positive, read
from prefix_train.bench_cli import app as bench_app
from prefix_train.compare.cli import compare_command
from prefix_train.exports.cli import check_command, export_command
from prefix_train.stream.cli import app as stream_app

MANY, FEW = 64, 2
"""Examples that `verify` compares: of a run, and in the five ways of --engine stream."""

app = make_app("Fine-tunes (vision-)language models on shared-prefix packs. Start with `make demo`.")
data_app = make_app("Write demonstration data. Example: prefix-train data digits")
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")
app.add_typer(stream_app, name="stream")
app.command("compare")(compare_command)
app.command("export")(export_command)
app.command("check")(check_command)


@data_app.command("digits")
def digits_command(
    folder: Annotated[Path, typer.Argument(help="Folder to write to.")] = Path("demo-data/digits"),
    as_json: Json = False,
) -> None:
    """1,797 real handwritten digits as PNG files, and chat rows under two long instruction sets."""
    from prefix_train.digits import write_digits

    _written(folder, write_digits(folder), as_json)


@data_app.command("biopsies")
def biopsies_command(
    folder: Annotated[Path, typer.Argument(help="Folder to write to.")] = Path("demo-data/biopsies"),
    as_json: Json = False,
) -> None:
    """569 real breast biopsies, five measures each, as chat rows under one long instruction."""
    from prefix_train.biopsies import write_biopsies

    _written(folder, write_biopsies(folder), as_json)


def _written(folder: Path, counts: Mapping[str, int], as_json: bool) -> None:
    answer(dict(counts), f"{folder}: " + ", ".join(f"{count:,} {what}" for what, count in counts.items()), as_json)


@app.command("plan")
def plan_command(
    where: Annotated[
        Path,
        typer.Argument(
            help="Configuration (YAML), run folder, or data: chat JSONL, parquet, a saved dataset, a folder of prompts."
        ),
    ],
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option(help="Model folder, for data without a configuration.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write all of it as one page with pictures to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Which examples meet in which pack, and what sharing saves. Example: prefix-train plan data.jsonl --model M"""
    from prefix_train import planning
    from prefix_train.plan_page import page

    changes = overrides or []
    is_data = model is not None or planning.is_data(where)
    if is_data and where.suffix in (".yaml", ".yml"):
        raise UserError(f"{where} is a configuration: its model is model.path; leave --model out")
    config = planning.of_data(where, model, changes) if is_data else read(where, overrides)
    given = any(change.startswith(("pack.max_positions", "data.max_example_tokens")) for change in changes)
    is_run = not is_data and where.is_dir()  # each life of one plans: no start shall wait for advice, or end with it
    planned = planning.make(config, keep=not is_data, choose_size=is_data and not given, advise=not is_run)
    found = planning.summary(planned)
    if is_run and not planned.refused:
        runfolder.write_json(where / runfolder.PLAN, found)  # a person's command belongs to no life of the run
    if html is not None:
        page.write(planned, found, html)
    answer(found, planning.describe(planned, found) + (f"\n{html}" if html is not None else ""), as_json)
    if planned.refused:
        raise UserError(planned.refused)


@app.command("budget")
def budget_command(
    where: Where,
    overrides: Overrides = None,
    gpu_gb: Annotated[
        float | None,
        typer.Option(callback=positive, help="Memory of a GPU, in 10^9 bytes; this machine's, or 80 without one."),
    ] = None,
    host_gb: Annotated[
        float | None, typer.Option(callback=positive, help="Memory that a node may pin, in 10^9 bytes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Memory and arithmetic of the run's largest pack, term by term, what each option changes, and what would fit.

    Its segments are those of the plan; before `prefix-train plan`, one example as long as pack.max_positions. Ranks on
    a CPU have this machine's memory, in equal parts.
    """
    from prefix_train import budget, budget_choices, budget_room, lengths

    config = read(where, overrides)
    index = lengths.load(config) if lengths.exists(config) else None
    largest_pack = None if index is None else lengths.largest_pack(config, index)
    begin = "" if index is not None else f"{budget.UNPLANNED}\n"
    if config.engine == "stream":
        from prefix_train.stream import origin, planner

        if config.stream.store is not None and (Path(config.stream.store) / origin.MANIFEST).is_file():
            origin.require(config)
        plan = planner.make(config, largest_pack)
        answer(plan.summary(), begin + plan.describe(), as_json)
        return
    found, room = budget.predict(config, largest_pack), budget_room.find(config, gpu_gb, host_gb)
    listed = budget_choices.choices(config, found)
    verdict = budget_choices.judge(config, found, listed, room)
    longest = None if index is None else int(index.lengths.max())
    answer(
        budget.summary(found) | {"planned": index is not None} | budget_choices.summary(listed, room, verdict),
        f"{begin}{budget.describe(found, room.each)}\n"
        + budget_choices.describe(listed, found, room, verdict, longest),
        as_json,
    )


@app.command("kernels")
def kernels_command(
    where: Where,
    overrides: Overrides = None,
    prove: Annotated[bool, typer.Option("--prove", help="Run every kernel of the job and count searches.")] = False,
    pins: Annotated[Path | None, typer.Option(help="Folder of pins.", envvar="FLA_CONFIG_DIR")] = None,
    as_json: Json = False,
) -> int:
    """Which kernels of the job are pinned; with --prove, that none searches. Example: prefix-train kernels C --prove"""
    from prefix_train import kernels

    config = read(where, overrides)
    if not prove:
        print(kernels.use_pins(pins))
        return 0
    found = kernels.prove(config, pins)
    answer(found, kernels.describe(found), as_json)
    return 0 if found["passed"] else 1


@app.command("tune")
def tune_command(
    where: Where,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; configs/fla/<GPU> by default.")] = None,
    as_json: Json = False,
) -> int:
    """Search once for every kernel of the job, on this GPU, write the pins and prove them in a fresh process."""
    from prefix_train import kernels, tune

    found = tune.tune(read(where, overrides), out)
    proof = tune.prove(where, overrides or [], Path(found["folder"]))
    searched = f"{counted(len(found['kernels']), 'kernel')}, searched {counted(found['searches'], 'time')}"
    text = f"{found['folder']}: {searched}, {found['seconds']} s"
    answer({**found, "proof": proof}, f"{text}\n{kernels.describe(proof)}", as_json)
    return 0 if proof["passed"] else 1


@app.command("train")
def train_command(run_folder: RunFolder) -> int:
    """Train a run folder as the rank that RANK and WORLD_SIZE name; `python -m slurm.submit` starts all ranks."""
    from prefix_train.train import main as train

    return train(run_folder)


@app.command("verify")
def verify_command(
    where: Where,
    overrides: Overrides = None,
    examples: Annotated[
        int | None, typer.Option(min=1, help="Held-out examples to compare: 64, with --engine stream 2.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="`stream`: check that engine instead of a run's outcome.")] = None,
    as_json: Json = False,
) -> int:
    """Compare packs with transformers' own unpatched model, on the trained weights of a run.

    With --engine stream: that engine on its store and data, against the resident engine and autograd in float64.
    """
    if engine is not None:
        return verify_engine(read(where, overrides), engine, examples or FEW, as_json)
    if not where.is_dir() or overrides:
        raise UserError(f"verify {where}: give a run folder alone; a configuration goes with --engine stream")
    from prefix_train import review, verify

    found = review.verify(where, examples or MANY)
    answer(found, f"{verify.describe(found)}\n{verify.said(found)}", as_json)
    return 0 if found["passed"] else 1


def verify_engine(config: Config, engine: str, examples: int, as_json: bool) -> int:
    """The checks of an engine as a table; 1 where one failed."""
    if engine != "stream" or config.engine != "stream":
        raise UserError(f"--engine {engine} with engine={config.engine}: checks are there for engine=stream alone")
    import torch

    from prefix_train.stream import checks

    torch.set_num_threads(config.train.threads)
    device = torch.device("cuda" if torch.cuda.is_available() and config.slurm.gpus_per_node else "cpu")
    found = checks.run(config, examples, device, lambda line: print(line, file=sys.stderr, flush=True))
    answer(checks.summary(found), checks.table(found), as_json)
    return 0 if checks.summary(found)["passed"] else 1


@app.command("evaluate")
def evaluate_command(
    run_folder: RunFolder,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="evaluate.key=value", help="Options of evaluation to change.")
    ] = None,
    checkpoint: Annotated[int | None, typer.Option(min=1, help="Update of the checkpoint; the newest.")] = None,
    base: Annotated[bool, typer.Option("--base", help="The model as it was before the first update.")] = False,
    data: Annotated[Path | None, typer.Option(help="Other data than the run's own held-out examples.")] = None,
    as_json: Json = False,
) -> None:
    """Held-out loss through packs, answers and their metrics. Example: prefix-train evaluate RUN --checkpoint 50"""
    from prefix_train import outcome, review

    found = review.evaluate(run_folder, review.Evaluation(checkpoint, base, data, tuple(overrides or ())))
    if int(os.environ.get("RANK", "0")) == 0:
        lines = [*outcome.lines(found), *([f"predictions: {found['predictions']}"] if "predictions" in found else [])]
        answer(found, "\n".join(lines), as_json)


@app.command("report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; several are shown side by side.")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file; report.html in the run folder, of several in the working folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """One HTML page of what runs came to: curves, memory, packs, hangs and lives, preflight, what was counted."""
    from prefix_train.results import page, tables

    found, place = page.read(runs), page.place_of(runs, out)
    page.write(found, place)
    lines = [f"{run.label}: {tables.state(run)}" for run in found]
    lines += [f"{run.label}: not shown: {line}" for run in found for line in run.missing]
    document = {
        "page": str(place),
        "runs": [{"run": str(run.folder), "state": tables.state(run), "missing": list(run.missing)} for run in found],
    }
    answer(document, "\n".join([*lines, str(place)]), as_json)


def main() -> None:
    """Entry point of the console script."""
    be_quiet()
    run(app)


def be_quiet() -> None:
    """Have transformers, which has not been imported yet, say no more than errors, and draw no bars into a file.

    What its own model falls back to is said where it matters: under `kernels` in `result.json`, and by preflight.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


if __name__ == "__main__":
    main()
