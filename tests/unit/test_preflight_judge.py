"""Judging is pure: captured facts in, one verdict out."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import time
from pathlib import Path

import pytest

from configs.errors import UserError
from configs.schema import Config, PreflightConfig
from preflight import __main__, report
from preflight.compare import COMPARED
from preflight.judge import judge
from preflight.packages import judge_package
from preflight.states import Finding, NodeReport
from preflight.torch_facts import mapped_libraries

SITE = "/opt/env/lib/python3.11/site-packages"


def facts(package: str = "torch", **changes: object) -> dict[str, object]:
    return {
        "package": package,
        "absent": False,
        "declared": "2.13.0",
        "folder": SITE,
        "also": [],
        "changed": [],
        "record_sha256": "ab",
        "editable": False,
        "version": "2.13.0+cpu",
        "path": f"{SITE}/{package}/__init__.py",
        "from": "site",
    } | changes


def node(name: str, *findings: Finding) -> NodeReport:
    host = Finding("host.name", "pass", f"{name} is 10.0.0.1", "", {"addresses": ["10.0.0.1"], "loopback": False})
    return NodeReport(name, (host, *findings))


def test_one_fit_node_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    given = "model: {build: {model_type: qwen3}}\ndata: {train: t}\npack: {packs_per_update: 2}\ntrain: {updates: 1}\n"
    (tmp_path / "config.yaml").write_text(given)
    (tmp_path / "preflight" / "0").mkdir(parents=True)
    for name in ("node1", "node2"):
        content = json.dumps(node(name).to_json())
        (tmp_path / "preflight" / "0" / f"{name}.json").write_text(content)
        assert __main__.judge_command(tmp_path) == 0
        said.append(capsys.readouterr().out.splitlines())
    assert said[0] == ["PASS: 1 node(s)"]
    assert len(said[1]) > 1
    assert len((tmp_path / "preflight" / "0" / "report.txt").read_text().splitlines()) > 1


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
        ({"from": "user-site", "also": ["2.11.0"]}, ["shadows the installed 2.11.0", "user's own folder"]),
        ({"changed": ["torch/nn/init.py", "torch/x.py"]}, ["torch/nn/init.py and 1 more", "not the file"]),
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
    monkeypatch.setattr("preflight.judge.outliers", lambda nodes: [])
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


def loopback_nodes() -> list[NodeReport]:
    loopback = Finding("host.name", "pass", "here", "", {"addresses": ["127.0.1.1"], "loopback": True})
    return [NodeReport("node1", (loopback,)), node("node2"), node("node3")]


def test_r35_a_host_name_that_means_loopback() -> None:
    nodes = loopback_nodes()
    assert judge(nodes[:1], ["node1"]).passed
    verdict = judge(nodes, ["node1", "node2", "node3"])
    assert verdict.bad_nodes == ("node1",)
    for words in ("node1", "127.0.1.1", "/etc/hosts", "GLOO_SOCKET_IFNAME"):
        assert words in report.headline(verdict)


def test_r35_fails_without_the_check_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("preflight.judge._cut_off", lambda nodes: [])
    assert judge(loopback_nodes(), []).passed


def test_a_host_name_with_an_address_of_no_interface() -> None:
    facts = {"addresses": ["10.0.0.99"], "loopback": False, "interface": None}
    stale = NodeReport("node1", (Finding("host.name", "pass", "here", "", facts),))
    assert judge([stale], ["node1"]).passed
    (problem,) = judge([stale, node("node2")], []).problems
    assert (problem.node, problem.finding.check) == ("node1", "host.name")
    assert problem.finding.found == "node1 resolves to 10.0.0.99, which no interface of this node has"
    held = NodeReport("node1", (Finding("host.name", "pass", "here", "", {**facts, "interface": "eth0"}),))
    assert judge([held, node("node2")], []).passed


def with_memory(*gib: float) -> list[NodeReport]:
    said = [Finding("host.memory", "pass", f"{size:.1f} GiB of memory available", "", {"gib": size}) for size in gib]
    return [node(f"node{i}", finding) for i, finding in enumerate(said)]


def test_a_node_with_far_less_memory_than_the_others() -> None:
    (problem,) = judge(with_memory(1000.0, 480.0, 1007.0), []).problems
    assert (problem.node, problem.finding.check) == ("node1", "host.memory")
    assert "480.0 GiB" in problem.finding.found
    assert "the median of 3 nodes is 1000.0 GiB" in problem.finding.found
    assert "DefMemPerCPU" in problem.finding.advice
    for healthy in [(1000.0, 510.0, 1007.0), (2000.0, 1000.0), (8.0,), (1000.0, 1000.0, 4000.0)]:
        assert judge(with_memory(*healthy), []).passed


def test_another_python_is_told_before_the_imports_that_fail_for_it() -> None:
    pythons = [Finding("python.version", "pass", "", "", {"version": v}) for v in ("3.11.9", "3.11.9", "3.10.14")]
    failed = Finding("import.peft", "fail", "import peft: SyntaxError", "repair it")
    nodes = [node(f"node{i}", python) for i, python in enumerate(pythons)]
    nodes[2] = node("node2", pythons[2], failed)
    verdict = judge(nodes, [])
    assert [problem.finding.check for problem in verdict.problems] == ["python.version", "import.peft"]
    assert "3.10.14" in report.headline(verdict)


def mapped(name: str, plugin: str) -> NodeReport:
    maps = (
        "7f1c00000000-7f1c00001000 r-xp 00000000 08:01 12 /opt/env/lib/libnccl.so.2\n"
        f"7f1c10000000-7f1c10001000 r-xp 00000000 08:01 13 {plugin}/libnccl-net.so\n"
        "7f1c20000000-7f1c20001000 rw-p 00000000 00:00 0\n"
        "7f1c30000000-7f1c30001000 r-xp 00000000 08:01 14 /usr/lib/libm.so.6\n"
    )
    libraries = mapped_libraries(maps)
    assert libraries.keys() == {"libnccl.so.2", "libnccl-net.so"}
    return node(name, Finding("libraries.mapped", "pass", "", "", {"libraries": libraries}))


def test_r37_a_network_plugin_from_elsewhere() -> None:
    nodes = [mapped("node1", "/opt/net"), mapped("node2", "/home/me/net"), mapped("node3", "/opt/net")]
    verdict = judge(nodes, [])
    assert verdict.bad_nodes == ("node2",)
    assert "/home/me/net/libnccl-net.so" in report.headline(verdict)
    assert "/opt/net/libnccl-net.so on 2 of 3" in report.headline(verdict)


def test_r37_fails_without_the_mapped_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPARED, "libraries.mapped", ())
    nodes = [mapped("node1", "/opt/net"), mapped("node2", "/home/me/net"), mapped("node3", "/opt/net")]
    assert judge(nodes, []).passed


def test_without_a_majority_all_that_differ_are_named_and_it_is_said() -> None:
    odd = package_finding(version="2.12.0", declared="2.12.0")
    verdict = judge([node("node1", package_finding()), node("node2", odd)], [])
    assert verdict.bad_nodes == ("node1", "node2")
    assert "no majority" in report.headline(verdict)


def test_one_cause_is_one_problem() -> None:
    odd = package_finding(version="2.12.0", declared="2.12.0", record_sha256="cd")
    verdict = judge([node(f"node{i}", package_finding()) for i in range(3)] + [node("node9", odd)], [])
    assert len(verdict.problems) == 1


def test_a_clock_from_the_future_and_an_old_answer() -> None:
    now = 1_000_000.0
    walls = {"node1": now - 5, "node2": now + 60, "node3": now - 3600, "node4": now - 8}
    nodes = [dataclasses.replace(node(name), wall=wall) for name, wall in walls.items()]
    assert {p.node: p.finding.check for p in judge(nodes, [], received=now).problems} == {
        "node2": "host.clock",
        "node3": "host.clock",
    }


def test_a_check_that_a_node_has_no_word_of_is_broken() -> None:
    disk = Finding("host.disk", "pass", "")
    verdict = judge([node("node1", disk), node("node2", disk), node("node3")], [])
    assert [(p.node, p.finding.check, p.finding.state) for p in verdict.problems] == [("node3", "host.disk", "broken")]


def gpu_at(watts: str) -> Finding:
    return Finding("device.gpus", "pass", "", "", {"gpus": [{"index": "0", "power.draw": watts}], "compared": {}})


def test_power_at_rest_far_over_the_median() -> None:
    nodes = [node(f"node{i}", gpu_at(watts)) for i, watts in enumerate(("75.1", "120.4", "420.0", "[N/A]"))]
    assert [(p.node, p.finding.check) for p in judge(nodes, []).problems] == [("node2", "device.power")]


def test_512_nodes_are_judged_in_two_seconds() -> None:
    files = {f"model-{i}.safetensors": f"{i}:aa" for i in range(64)}
    findings = [dataclasses.replace(package_finding(package=f"p{i}"), check=f"import.p{i}") for i in range(14)]
    findings += [Finding("host.files", "pass", "", "", {"files": {"model.path": files}})]
    documents = [node(f"node{i}", *findings).to_json() for i in range(512)]
    began = time.process_time()
    verdict = judge([NodeReport.from_json(document) for document in documents], [f"node{i}" for i in range(513)])
    shown = report.text(verdict), report.html(verdict), report.document(verdict)
    assert time.process_time() - began < 2
    assert verdict.bad_nodes == ("node512",)
    assert len(shown[0].splitlines()) < 60


def test_rows_of_the_report_are_states_not_nodes() -> None:
    verdict = judge([node(f"node{i}", package_finding()) for i in range(64)], [])
    head, empty, columns, row = report.text(verdict).splitlines()
    assert (head, empty, columns.split()) == ("PASS: 64 node(s)", "", ["nodes", "worst", "checks", "state"])
    assert row.split()[:2] == ["64", "pass"]


def test_an_odd_state_has_a_row_that_says_in_what_it_differs() -> None:
    odd = package_finding(version="2.12.0", declared="2.12.0")
    verdict = judge([*(node(f"node{i}", package_finding()) for i in range(5)), node("node7", odd)], ["node9"])
    lines = report.text(verdict).splitlines()
    assert lines[0].startswith("FAIL node7: fail: import.torch")
    assert lines[0].endswith("(and 1 more)")
    assert lines[1].strip().startswith("node9: silent: node.answer")
    rows = lines[lines.index("") + 2 :]
    assert [row.split()[:2] for row in rows] == [["1", "fail"], ["1", "silent"], ["5", "pass"]]
    assert rows[0].endswith("import.torch: node7")
    assert rows[1].endswith("node.answer: node9")


def test_the_report_stays_on_one_screen_whatever_is_wrong() -> None:
    nodes = [node(f"node{i}", package_finding(version=f"2.{i}.0", declared=f"2.{i}.0")) for i in range(64)]
    lines = report.text(judge(nodes, [])).splitlines()
    assert len(lines) <= 30
    assert "states in report.html" in lines[-1]


def test_the_json_document_round_trips_and_the_page_escapes() -> None:
    evil = Finding("import.x", "fail", "<script>alert(1)</script>")
    verdict = judge([node("node1", evil)], [])
    assert "<script>" not in report.html(verdict)
    again = NodeReport.from_json(report.document(verdict)["nodes"][0])
    assert again == dataclasses.replace(verdict.nodes[0])


def test_an_answer_that_cannot_be_written_is_printed_and_says_where_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("preflight.collect.collect", lambda config, run: node("node7", package_finding()))
    monkeypatch.setattr("configs.compose.from_run", lambda run: Config())
    monkeypatch.setattr("configs.runfolder.write_json", full)
    with pytest.raises(UserError, match=r"^node7: .*/preflight/0/node7\.json cannot be written: No space left"):
        __main__.run_command(tmp_path)
    assert capsys.readouterr().out.startswith("PASS: 1 node(s)")
