"""`python -m preflight run | judge | show`: exit status 0 only when the job may go on, 1 when it may not."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

import typer

from configs import runfolder
from configs.console import make_app, print_json, run
from configs.errors import UserError
from configs.schema import Config
from preflight import drain, pairs, report
from preflight.baseline import answer_path
from preflight.environment import without_secrets
from preflight.judge import Verdict, judge
from preflight.names import check_allowed
from preflight.states import Finding, NodeReport

app = make_app("Is every node what it claims to be? Example: python -m preflight run")

RunFolder = Annotated[Path | None, typer.Argument(help="Run folder; without one, this machine is checked by itself.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line.")]


@app.command("run")
def run_command(
    run_folder: RunFolder = None,
    package: Annotated[list[str] | None, typer.Option(help="Check this package too (repeat).")] = None,
    deadline: Annotated[float | None, typer.Option(min=1, help="Seconds until a check counts as silent.")] = None,
    as_json: Json = False,
) -> int:
    """Check this node. With a run folder its file is left there for `judge`; else the report is printed."""
    from preflight.collect import collect

    config, broken = _config(run_folder)
    options = dataclasses.replace(
        config.preflight,
        packages=[*config.preflight.packages, *(package or [])],
        deadline_s=config.preflight.deadline_s if deadline is None else deadline,
    )
    found = collect(dataclasses.replace(config, preflight=options), run_folder)
    found = dataclasses.replace(found, findings=(*broken, *found.findings))
    found = NodeReport.from_json(without_secrets(found.to_json(), os.environ))
    if run_folder is not None:
        path = answer_path(run_folder, runfolder.current_attempt(run_folder), found.node)
        try:
            runfolder.write_json(path, found.to_json(), run=runfolder.of_life(run_folder))
        except OSError as error:
            _print(judge([found], [found.node], options.allow), as_json)
            raise UserError(f"{found.node}: {path} cannot be written: {error.strerror}") from error
    return _print(judge([found], [found.node], options.allow), as_json)


@app.command("collectives")
def collectives_command(
    run_folder: Annotated[Path, typer.Argument(help="Run folder.")],
    spawn: Annotated[int, typer.Option(min=0, help="Start so many ranks on this machine instead of being one.")] = 0,
) -> int:
    """Test the collectives as one rank; start it once per rank: srun python -m preflight collectives RUN."""
    from preflight import ranks

    config = _config(run_folder)[0]
    if spawn:
        ranks.forget(_folder(run_folder))
        ranks.spawn(run_folder, spawn)
        found = pairs.judge_ranks(ranks.read(_folder(run_folder)), spawn, dict.fromkeys(range(spawn), "this machine"))
        for node, finding in found:
            print(f"{finding.state}: {node}: {finding.check}: {finding.found}")
        return 0 if all(finding.state == "pass" for _, finding in found) else 1
    seconds, gpus = config.preflight.collective_deadline_s, config.slurm.gpus_per_node
    return 0 if ranks.test_rank(_folder(run_folder), run_folder, seconds, gpus).done else 1


@app.command("judge")
def judge_command(
    run_folder: Annotated[Path, typer.Argument(help="Run folder.")],
    nodes: Annotated[str, typer.Option(help="Nodes that should have answered, separated by commas.")] = "",
    ranks: Annotated[int, typer.Option(min=0, help="Ranks whose collective test should have answered; 0: none.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Where all is well print nothing.")] = False,
    as_json: Json = False,
) -> int:
    """Compare all nodes' files and write report.txt, report.json and report.html."""
    folder = _folder(run_folder)
    files = sorted(path for path in folder.glob("*.json") if path.name != "report.json")
    expected = [name for name in nodes.split(",") if name]
    if not files and not expected:
        raise UserError(
            f"no node has answered in {folder}: run `python -m preflight run {run_folder}` on each node first"
        )
    reports = [_read(path) for path in files]
    config, broken = _config(run_folder)
    if broken:
        reports.append(NodeReport("judge", tuple(broken)))
    between = _between(folder, ranks, expected or [found.node for found in reports], config) if ranks else []
    passes = tuple(finding for _, finding in between if finding.state == "pass")
    reports = [dataclasses.replace(found, findings=(*found.findings, *passes)) for found in reports]
    verdict = judge(reports, expected, config.preflight.allow, received=time.time(), between=between)
    between_ranks = [f"between ranks: {finding.found}" for finding in passes if len(reports) > 1]  # one node has a row
    more = [*between_ranks, *_drains(verdict, expected)]
    text = report.text(verdict) + "".join(f"{line}\n" for line in more)
    try:
        runfolder.write_json(folder / "report.json", report.document(verdict), run=runfolder.of_life(run_folder))
        runfolder.write_text(folder / "report.html", report.html(verdict), run=runfolder.of_life(run_folder))
        runfolder.write_text(folder / "report.txt", text, run=runfolder.of_life(run_folder))
    except OSError as error:
        _print(verdict, as_json, text)
        raise UserError(f"the report cannot be written into {folder}: {error.strerror or error}") from error
    if verdict.passed and not verdict.problems and not as_json:
        if quiet:
            return 0
        if len(verdict.nodes) == 1:
            print("; ".join([report.headline(verdict), *(finding.found for finding in passes)]))
            return 0
    return _print(verdict, as_json, text)


@app.command("show")
def show_command(run_folder: Annotated[Path, typer.Argument(help="Run folder.")]) -> int:
    """Print the last report."""
    path = _folder(run_folder) / "report.txt"
    if not path.exists():
        raise UserError(f"{path} does not exist: run `python -m preflight judge {run_folder}` first")
    with runfolder.reading():
        shown = path.read_text(encoding="utf-8", errors="replace")
    sys.stdout.write(shown)
    return 0 if shown.startswith("PASS") else 1


def _between(folder: Path, ranks: int, nodes: list[str], config: Config) -> list[tuple[str, Finding]]:
    """What the collective test says of each node. Ranks are dealt to nodes in order, as Slurm does by default.

    Where no rank at all has answered, the step did not begin, and no node is to blame for that.
    """
    from preflight.ranks import read

    with runfolder.reading():
        answers = read(folder)
    if not answers:
        found = f"none of {ranks} ranks has answered: the collective test did not begin"
        return [(pairs.THE_JOB, Finding("collective.join", "broken", found, "look at the end of the job's log"))]
    per_node = max(1, ranks // max(1, len(nodes)))
    node_of = {rank: nodes[min(rank // per_node, len(nodes) - 1)] for rank in range(ranks)} if nodes else {}
    return pairs.judge_ranks(answers, ranks, node_of, config.preflight.min_pair_gib_s)


def _drains(verdict: Verdict, nodes: list[str]) -> list[str]:
    """What an administrator may run for each unfit node of a Slurm job; where all of several are, no node is odd."""
    bad = [node for node in verdict.bad_nodes if node in nodes]
    if len(bad) == len(nodes) > 1:
        return []
    worst = {problem.node: problem.finding for problem in reversed(verdict.problems) if not problem.allowed}
    commands = [drain.command(node, f"{worst[node].check}: {worst[node].found}") for node in bad]
    return ["", "for the administrator, to take the unfit nodes out of service:", *commands] if commands else []


def _config(run_folder: Path | None) -> tuple[Config, list[Finding]]:
    """The run's options. What reads them may itself be what is wrong with this node: that is a finding, not a crash."""
    if run_folder is None:
        return Config(), []
    try:
        from configs.compose import from_run
    except ImportError as error:
        return Config(), [Finding("preflight.config", "broken", f"config.yaml cannot be read here: {error}")]
    config = from_run(run_folder)
    check_allowed(config.preflight.allow)
    return config, []


def _read(path: Path) -> NodeReport:
    """One node's answer; a file of another form, or of another node, is a broken check of that node."""
    node = unquote(path.stem)
    try:
        found = NodeReport.from_json(runfolder.read_json(path))
        if found.node == node:
            return found
        why = f"it is that of {found.node!r}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
    said = f"{path.name} is not this node's answer: {why}"
    return NodeReport(node, (Finding("node.answer", "broken", said, "check this node again"),))


def _folder(run_folder: Path) -> Path:
    with runfolder.reading():
        return run_folder / runfolder.PREFLIGHT / str(runfolder.current_attempt(run_folder))


def _print(verdict: Verdict, as_json: bool, text: str | None = None) -> int:
    sys.stdout.write(report.text(verdict) if text is None else text)
    if as_json:
        print_json(report.document(verdict))
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    run(app)
