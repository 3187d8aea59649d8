"""Real services for end-to-end tests, started once for all tests that can share them, and two hosts to run them on."""

from contextlib import ExitStack

import pytest

from support.flags import ENGINE, SPLIT
from twofold.bench.services import served
from twofold.bench.two_hosts import two_hosts
from twofold.errors import ConfigurationError


@pytest.fixture(scope="session")
def service(tiny_model_dir):
    """Returns the URL of a running service for (architecture, flags), started once for the session."""
    urls: dict[tuple[str, tuple[str, ...]], str] = {}
    with ExitStack() as running:

        def url(arch: str = "llama", flags: tuple[str, ...] = SPLIT) -> str:
            key = (arch, flags)
            if key not in urls:
                urls[key] = running.enter_context(served(tiny_model_dir(arch), (*ENGINE, *flags)))
            return urls[key]

        yield url


@pytest.fixture(scope="module")
def hosts():
    """This host and another, joined by a cable that can be cut: network namespaces, where they can be had."""
    try:
        with two_hosts(first_here=True) as joined:
            yield joined
    except ConfigurationError as error:
        pytest.skip(str(error))
