"""Tests of `twofold doctor`, and of the completion of commands in a shell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import twofold as package


def test_doctor_reports_this_machine(twofold):
    ended = twofold("doctor", "--json")
    report = json.loads(ended.out)
    found = {each["part"]: each for each in report["findings"]}
    assert ended.code == 0
    assert found["Twofold"]["found"].startswith(package.__version__)
    assert found["host"]["found"].startswith(f"{len(os.sched_getaffinity(0))} cores, ")
    assert report["run"][-1].startswith("twofold plan ")


def test_doctor_says_how_to_install_what_is_missing(twofold, monkeypatch):
    monkeypatch.setattr("twofold.cli.serve.doctor.package_version", lambda _package: None)
    monkeypatch.setenv("COLUMNS", "200")
    ended = twofold("doctor")
    assert "pip install 'twofold[serve]', to serve models" in ended.out
    assert "pip install 'twofold[nixl]', for --transport nixl" in ended.out
    assert "twofold serve" not in ended.out.partition("Run:")[2]  # nothing can be served


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("twofold simu", ["simulate"]),
        ("twofold plan --objec", ["--objective"]),
        ("twofold serve m --router condu", ["conductor"]),
        ("twofold catalog mod", ["models"]),
    ],
)
def test_bash_completes_commands_flags_and_choices(typed, completed):
    script = f"""
    eval "$(_TWOFOLD_COMPLETE=source_bash twofold)"
    COMP_WORDS=({typed}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
    _twofold_completion twofold; printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", script], env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == completed
