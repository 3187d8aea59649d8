"""Real services for end-to-end tests: started once for all tests that can share them."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from support.flags import ENGINE, SPLIT
from twofold.demo.services import served


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """Returns the directory of a tiny model of an architecture, made once."""
    from support.tiny_models import write_tiny_model  # imports torch, which most tests here do not need

    made: dict[str, Path] = {}

    def directory(arch: str) -> Path:
        if arch not in made:
            made[arch] = write_tiny_model(arch, tmp_path_factory.mktemp(arch))
        return made[arch]

    return directory


@pytest.fixture(scope="session")
def service(model_dir):
    """Returns the URL of a running service for (architecture, flags), started once for the session."""
    urls: dict[tuple[str, tuple[str, ...]], str] = {}
    with ExitStack() as running:

        def url(arch: str = "llama", flags: tuple[str, ...] = SPLIT) -> str:
            key = (arch, flags)
            if key not in urls:
                urls[key] = running.enter_context(served(model_dir(arch), (*ENGINE, *flags)))
            return urls[key]

        yield url
