"""Packages of one node: what is declared against what is imported, and whether it is what was installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from configs import runfolder
from configs.schema import PreflightConfig
from preflight import imports
from preflight.programs import Answer, one_by_one
from preflight.setting import Setting
from preflight.states import Finding

REINSTALL = "install the same environment on this node, or point the job at the right one"


def check_packages(setting: Setting) -> list[Finding]:
    """Declared against imported, for every package that matters."""
    options = setting.config.preflight
    wanted = list(dict.fromkeys([*imports.REQUIRED, *options.packages, *imports.OPTIONAL]))
    argv = [sys.executable, "-m", "preflight.imports"]
    return [
        _import_failed(package, found) if isinstance(found, Answer) else judge_package(found, options)
        for package, found in one_by_one(argv, wanted, lambda: setting.left_s)
    ]


def _import_failed(package: str, answer: Answer) -> Finding:
    check = f"import.{package}"
    if answer.status is None:
        return Finding(check, "silent", f"import {package} did not end in time")
    how = f"was killed by signal {-answer.status}" if answer.status < 0 else answer.last_error_line
    return Finding(check, "fail", f"import {package}: {how}", f"repair or remove {package} on this node",
                   {"package": package, "error": answer.stderr[-4000:]})  # fmt: skip


def judge_package(facts: dict[str, Any], options: PreflightConfig) -> Finding:
    """One package's facts (see `imports.describe`) -> a finding. Pure."""
    package, check = facts["package"], f"import.{facts['package']}"
    if facts["absent"]:
        needed = package in imports.REQUIRED or package in options.packages
        return Finding(check, "fail" if needed else "pass", f"{package} is not installed", REINSTALL, facts)
    wrong = _wrong(package, facts)
    if wrong:
        return Finding(check, "fail", *wrong, facts)
    return Finding(check, "pass", f"{package} {facts['version'] or facts['declared']}", "", facts)


def _wrong(package: str, facts: dict[str, Any]) -> tuple[str, str] | None:
    """What is wrong with a package that could be imported, and what to do."""
    declared, version = facts.get("declared"), facts["version"]
    origin = f"{facts['path']} (from {facts['from']})"
    if declared is None:
        return (f"{package} is imported from {origin} but no installed package declares it",
                "remove it from PYTHONPATH, or install it")  # fmt: skip
    if not facts["editable"] and not Path(facts["path"]).is_relative_to(facts["folder"]):
        return (f"{package} {version} is imported from {origin}, which shadows the installed {declared} in "
                f"{facts['folder']}", "take that folder off PYTHONPATH")  # fmt: skip
    if version is not None and version.split("+")[0] != declared.split("+")[0]:
        return f"{package}: {declared} is declared, {version} is imported from {origin}", REINSTALL
    others = [other for other in facts.get("also", []) if other != declared]
    if facts["from"] == "user-site" and others:
        return (f"{package} {declared} of the user's own folder ({facts['folder']}) shadows the installed "
                f"{', '.join(others)}", "uninstall it there, or set PYTHONNOUSERSITE=1")  # fmt: skip
    edited = facts.get("changed", [])
    if edited and not facts["editable"]:
        more = f" and {len(edited) - 1} more" if len(edited) > 1 else ""
        return (f"{package} {declared}: {edited[0]}{more} in {facts['folder']} is not the file that was installed",
                f"reinstall {package} on this node")  # fmt: skip
    return None


def check_code(setting: Setting) -> list[Finding]:
    """The run's frozen code, as this node reads it, and whether it is what runs here."""
    code = None if setting.run is None else setting.run / runfolder.CODE
    if code is None or not code.is_dir():
        return []
    digest = imports.sources(code, "*")
    here = Path(__file__).resolve().parent.parent
    facts = {"sha256": digest, "runs_from": str(here)}
    return [Finding("code.snapshot", "pass", f"frozen code {digest[:12]}", "", facts)]
