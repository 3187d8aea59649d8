"""What tests of commands share."""

import sys
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from support.hosts import profile
from twofold.cli.main import main
from twofold.hardware.hf_config import read_model
from twofold.performance.host_profile import dump_host_profile


@pytest.fixture
def model(tiny_model_dir):
    """A small Llama model on disk."""
    return tiny_model_dir("llama")


@pytest.fixture
def host(tmp_path, model):
    """A profile of a host with that model."""
    path = tmp_path / "host.yaml"
    path.write_text(dump_host_profile(replace(profile(), model=read_model(model))))
    return path


@dataclass(frozen=True, slots=True)
class Ended:
    """The exit status of a command, and what it wrote."""

    code: int
    out: str
    err: str


@pytest.fixture
def twofold(monkeypatch, capsys):
    """Runs `twofold` with arguments, from its entry point to its end, in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["twofold", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return Ended(ended.value.code, said.out, said.err)

    return run


@pytest.fixture
def refused(twofold):
    """What a command says that ends before any process is started."""

    def run(*arguments):
        ended = twofold(*arguments)
        assert ended.code == 2
        said = ended.err.strip()
        assert said.startswith("twofold: ")
        return " ".join(said.split())

    return run
