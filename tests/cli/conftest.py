"""What tests of commands share."""

import sys

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


@pytest.fixture
def refused(monkeypatch, capsys):
    """What a command says that ends before any process is started."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["twofold", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        said = capsys.readouterr().err.strip()
        assert said.startswith("twofold: ")
        return " ".join(said.split())

    return run
