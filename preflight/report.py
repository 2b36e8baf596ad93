"""A verdict -> text, JSON, HTML. One row per distinct state of the cluster, not per node."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jinja2 import Environment

from preflight.judge import Problem, Verdict
from preflight.states import WORST_FIRST, Finding, NodeReport

MOST_PROBLEMS, MOST_STATES, MOST_CHECKS = 12, 8, 4
"""What one screen holds: lines of problems, rows of odd states, checks named in a row."""
KEY_CHECKS = ("python.version", "torch.backends", "device.gpus", "pins.files")
"""Checks that say in a few words what a node is."""

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Preflight: {{ head }}</title>
<style>body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ccc;padding:.3rem .6rem;text-align:left;
vertical-align:top}.pass{color:#17632b}.fail,.broken,.silent{color:#a11818}</style>
<h1 class="{{ 'pass' if verdict.passed else 'fail' }}">{{ head }}</h1>
{% for problem in verdict.problems %}<p><b>{{ problem.node }}</b>
<span class="{{ problem.finding.state }}">{{ problem.finding.state }}{{ ' (allowed)' if problem.allowed }}</span>
{{ problem.finding.check }}: {{ problem.finding.found }}. {{ problem.finding.advice }}</p>{% endfor %}
{% if verdict.allow %}<p>Allowed by preflight.allow: {{ verdict.allow|join(', ') }}</p>{% endif %}
{% for names, findings in groups %}<details {{ 'open' if loop.first }}><summary>{{ names|length }} node(s):
{{ names|join(', ') }}</summary><table>{% for finding in findings %}<tr><td>{{ finding.check }}</td>
<td class="{{ finding.state }}">{{ finding.state }}</td><td>{{ finding.found }}
{% if finding.facts %}
<details><summary>facts</summary><pre>{{ finding.facts|tojson(indent=1) }}</pre></details>{% endif %}
</td></tr>{% endfor %}</table></details>
{% endfor %}</html>
"""


def headline(verdict: Verdict) -> str:
    """PASS, or FAIL with the odd node first: what differs, what to do."""
    stopping = [problem for problem in verdict.problems if not problem.allowed]
    if not stopping:
        return f"PASS: {len(verdict.nodes)} node(s)" + (", with allowed findings" if verdict.problems else "")
    more = f" (and {len(stopping) - 1} more)" if len(stopping) > 1 else ""
    return f"FAIL {_sentence(stopping[0])}{more}"


def _sentence(problem: Problem) -> str:
    finding = problem.finding
    advice = f" -> {finding.advice}" if finding.advice else ""
    return f"{problem.node}: {finding.state}: {finding.check}: {finding.found}{advice}"


def text(verdict: Verdict) -> str:
    """The report for one screen: the sentence, the other problems, one row per distinct state of the cluster.

    Of one node by itself all checks are listed.
    """
    lines = [headline(verdict)]
    rest = [problem for problem in verdict.problems if _sentence(problem) not in lines[0]]
    for problem in rest[:MOST_PROBLEMS]:
        lines.append(("  allowed: " if problem.allowed else "  ") + _sentence(problem))
    if len(rest) > MOST_PROBLEMS:
        lines.append(f"  ... and {len(rest) - MOST_PROBLEMS} more in report.json")
    if verdict.allow:
        lines.append(f"  preflight.allow: {', '.join(verdict.allow)}")
    lines.append("")
    if len(verdict.nodes) == 1:
        lines += [f"  {finding.state:<7}{finding.check:<24}{finding.found}" for finding in verdict.nodes[0].findings]
    else:
        lines += _table(verdict)
    return "\n".join(lines) + "\n"


def _table(verdict: Verdict) -> list[str]:
    """One row per distinct state, the odd ones first, the state of most nodes last and in full."""
    states = groups(verdict)
    usual = states[-1][1]
    shown = states[:-1][:MOST_STATES] + states[-1:]
    rows = ["nodes  worst   checks  state"]
    for names, report in shown:
        own = {problem.finding.check: problem.finding for problem in verdict.problems if problem.node == names[0]}
        worst = min((finding.state for finding in (*report.findings, *own.values())), key=WORST_FIRST.index)
        said = _usual(report) if report is usual and not own else _unlike(report, usual, list(own))
        rows.append(f"{len(names):>5}  {worst:<7} {len(report.findings):>6}  {said}: {_abbreviated(names)}")
    hidden = len(states) - len(shown)
    return [*rows, f"  ... and {hidden} more states in report.html"] if hidden else rows


def _usual(report: NodeReport) -> str:
    """What a node is, in a few words."""
    found = {finding.check: finding.found for finding in report.findings}
    return "; ".join(found[check] for check in KEY_CHECKS if check in found) or "alike"


def _unlike(report: NodeReport, usual: NodeReport, blamed: list[str]) -> str:
    """In which checks a node is blamed or is not like most nodes."""
    common = {finding.check: _key(finding) for finding in usual.findings}
    different = [finding.check for finding in report.findings if common.get(finding.check) != _key(finding)]
    checks = list(dict.fromkeys([*blamed, *different]))
    more = f" and {len(checks) - MOST_CHECKS} more" if len(checks) > MOST_CHECKS else ""
    return ", ".join(checks[:MOST_CHECKS]) + more


def html(verdict: Verdict) -> str:
    """One self-contained page."""
    page = Environment(autoescape=True).from_string(PAGE)
    rows = [(names, report.findings) for names, report in groups(verdict)]
    return page.render(verdict=verdict, head=headline(verdict), groups=rows) + "\n"


def document(verdict: Verdict) -> dict[str, Any]:
    """The report for machines."""
    return {"passed": verdict.passed, "headline": headline(verdict), "bad_nodes": list(verdict.bad_nodes),
            "problems": [asdict(problem) for problem in verdict.problems],
            "nodes": [report.to_json() for report in verdict.nodes]}  # fmt: skip


def groups(verdict: Verdict) -> list[tuple[list[str], NodeReport]]:
    """Nodes that are alike in everything that matters, the odd ones first."""
    blamed: dict[str, list[str]] = {}
    for problem in verdict.problems:
        blamed.setdefault(problem.node, []).append(problem.finding.check)
    alike: dict[str, tuple[list[str], NodeReport]] = {}
    for report in verdict.nodes:
        key = repr([*map(_key, report.findings), *blamed.get(report.node, [])])
        alike.setdefault(key, ([], report))[0].append(report.node)
    return sorted(alike.values(), key=lambda group: (len(group[0]), group[0][0] not in blamed, group[0]))


def _key(finding: Finding) -> tuple[str, str, str]:
    """What makes a state. Free space, addresses and counters differ between healthy nodes: they make none."""
    own = finding.state == "pass" and finding.check.startswith("host.")
    return finding.check, finding.state, "" if own else finding.found


def _abbreviated(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:8])}, ... ({len(names)})"
