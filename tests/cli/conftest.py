"""Fixtures shared by the tests of commands."""

import sys
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from support.hosts import profile
from twofold.cli.main import main
from twofold.hardware.hf_config import read_model
from twofold.performance.profile import dump_profile


@pytest.fixture
def model(tiny_model_dir):
    """Return the directory of a small Llama model."""
    return tiny_model_dir("llama")


@pytest.fixture
def host(tmp_path, model):
    """Return the path of a performance profile of the small Llama model."""
    path = tmp_path / "host.yaml"
    path.write_text(dump_profile(replace(profile(), model=read_model(model))))
    return path


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit status and output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def twofold(monkeypatch, capsys):
    """Return a function that runs the `twofold` command in the test process and returns exit status and output."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["twofold", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return Ended(ended.value.code, said.out, said.err)

    return run


@pytest.fixture
def refused(twofold):
    """Return a function that runs a command, checks that it fails with exit code 2, and returns the error message."""

    def run(*arguments):
        ended = twofold(*arguments)
        assert ended.code == 2
        said = ended.err.strip()
        assert said.startswith("twofold: ")
        return " ".join(said.split())

    return run
