"""What tests of several packages share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    """Returns the directory of a tiny model of an architecture, made once."""
    from support.tiny_models import write_tiny_model  # imports torch, which most tests do not need

    made: dict[str, Path] = {}

    def directory(arch: str) -> Path:
        if arch not in made:
            made[arch] = write_tiny_model(arch, tmp_path_factory.mktemp(arch))
        return made[arch]

    return directory
