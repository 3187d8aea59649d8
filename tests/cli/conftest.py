"""What tests of commands share."""

import pytest
from msgspec.structs import replace

from support.hosts import profile
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
