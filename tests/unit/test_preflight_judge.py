"""Judging is pure: captured facts in, one verdict out."""

from __future__ import annotations

import dataclasses

import pytest

from configs.schema import PreflightConfig
from preflight import report
from preflight.collect import judge_package
from preflight.judge import judge
from preflight.states import Finding, NodeReport

SITE = "/opt/env/lib/python3.11/site-packages"


def facts(package: str = "torch", **changes: object) -> dict[str, object]:
    return {
        "package": package,
        "absent": False,
        "declared": "2.13.0",
        "folder": SITE,
        "record_sha256": "ab",
        "editable": False,
        "version": "2.13.0+cpu",
        "path": f"{SITE}/{package}/__init__.py",
        "from": "site",
    } | changes


def node(name: str, *findings: Finding) -> NodeReport:
    host = Finding("host.name", "pass", f"{name} is 10.0.0.1", "", {"addresses": ["10.0.0.1"], "loopback": False})
    return NodeReport(name, (host, *findings))


def package_finding(**changes: object) -> Finding:
    return judge_package(facts(**changes), PreflightConfig())  # type: ignore[arg-type]


def test_declared_and_imported_agree_up_to_the_local_version() -> None:
    assert package_finding().state == "pass"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "2.12.0"}, ["2.13.0 is declared", "2.12.0 is imported"]),
        (
            {"path": "/home/me/lib/torch/__init__.py", "from": "PYTHONPATH"},
            ["/home/me/lib/torch", "PYTHONPATH", "shadows"],
        ),
        ({"absent": True, "declared": None}, ["not installed"]),
        ({"declared": None}, ["no installed package declares it"]),
    ],
)
def test_a_package_that_is_not_what_was_installed_fails(changes: dict[str, object], words: list[str]) -> None:
    finding = package_finding(**changes)
    assert finding.state == "fail"
    assert all(word in finding.found for word in words)


def test_an_optional_package_may_be_absent_unless_the_config_names_it() -> None:
    absent = facts("tilelang", absent=True, declared=None)
    assert judge_package(absent, PreflightConfig()).state == "pass"
    assert judge_package(absent, PreflightConfig(packages=["tilelang"])).state == "fail"


def test_r36_the_odd_node_is_named_first_with_its_path() -> None:
    odd = package_finding(version="2.12.0", declared="2.12.0", path=f"{SITE}/old/torch/__init__.py")
    nodes = [node(f"node{i}", package_finding()) for i in range(1, 4)] + [node("node4", odd)]
    verdict = judge(nodes, [n.node for n in nodes])
    assert not verdict.passed
    assert verdict.bad_nodes == ("node4",)
    line = report.headline(verdict)
    assert line.startswith("FAIL node4")
    assert "2.12.0" in line
    assert "2.13.0" in line
    assert f"{SITE}/old/torch" in line


def test_r36_fails_without_the_comparison_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = package_finding(version="2.12.0", declared="2.12.0")
    nodes = [node("node1", package_finding()), node("node2", package_finding()), node("node3", odd)]
    assert not judge(nodes, []).passed
    monkeypatch.setattr("preflight.judge._outliers", lambda nodes: [])
    assert judge(nodes, []).passed


def test_a_node_without_an_answer_is_silent_not_failed() -> None:
    verdict = judge([node("node1")], ["node1", "node2"])
    assert not verdict.passed
    assert [(p.node, p.finding.state) for p in verdict.problems] == [("node2", "silent")]


def test_allowed_findings_are_shown_and_do_not_stop() -> None:
    bad = Finding("host.disk", "fail", "0.1 GiB free", "free some space")
    verdict = judge([node("node1", bad)], ["node1"], allow=["host.disk"])
    assert verdict.passed
    assert "allowed" in report.text(verdict)


def test_r35_loopback_matters_only_between_nodes() -> None:
    loopback = Finding("host.name", "pass", "here", "", {"addresses": ["127.0.1.1"], "loopback": True})
    one, two = NodeReport("node1", (loopback,)), NodeReport("node2", (loopback,))
    assert judge([one], ["node1"]).passed
    verdict = judge([one, two], ["node1", "node2"])
    assert verdict.bad_nodes == ("node1", "node2")
    assert "127.0.1.1" in report.headline(verdict)


def test_rows_of_the_report_are_states_not_nodes() -> None:
    verdict = judge([node(f"node{i}", package_finding()) for i in range(64)], [])
    assert report.text(verdict).count("node(s):") == 1
    assert len(report.text(verdict).splitlines()) < 40


def test_the_json_document_round_trips_and_the_page_escapes() -> None:
    evil = Finding("import.x", "fail", "<script>alert(1)</script>")
    verdict = judge([node("node1", evil)], [])
    assert "<script>" not in report.html(verdict)
    again = NodeReport.from_json(report.document(verdict)["nodes"][0])
    assert again == dataclasses.replace(verdict.nodes[0])
