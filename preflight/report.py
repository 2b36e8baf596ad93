"""A verdict -> text, JSON, HTML. One row per distinct state of the cluster, not per node."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jinja2 import Environment

from preflight.judge import Problem, Verdict
from preflight.states import NodeReport

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
    """The report for one screen."""
    lines = [headline(verdict)]
    for problem in verdict.problems[:20]:
        lines.append(("  allowed: " if problem.allowed else "  ") + _sentence(problem))
    if len(verdict.problems) > 20:
        lines.append(f"  ... and {len(verdict.problems) - 20} more in report.json")
    if verdict.allow:
        lines.append(f"  preflight.allow: {', '.join(verdict.allow)}")
    for names, report in groups(verdict):
        lines += ["", f"{len(names)} node(s): {_abbreviated(names)}"]
        lines += [f"  {finding.state:<7}{finding.check:<24}{finding.found}" for finding in report.findings]
    return "\n".join(lines) + "\n"


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
    alike: dict[str, tuple[list[str], NodeReport]] = {}
    for report in verdict.nodes:
        key = repr([(f.check, f.state, _stable(f.check, f.found, f.state)) for f in report.findings])
        alike.setdefault(key, ([], report))[0].append(report.node)
    return sorted(alike.values(), key=lambda group: (len(group[0]), group[0]))


def _stable(check: str, found: str, state: str) -> str:
    """Free space and addresses differ between healthy nodes: they make no state of their own."""
    return "" if state == "pass" and check.startswith("host.") else found


def _abbreviated(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:8])}, ... ({len(names)})"
