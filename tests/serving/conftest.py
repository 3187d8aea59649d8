"""Fixtures of end-to-end tests: shared services, and a pair of emulated hosts."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from bench.two_hosts import two_hosts

from support.flags import ENGINE, SPLIT
from twofold.bench.services import served
from twofold.errors import ConfigurationError

HERE = Path(__file__).parent
MOST = 4  # services at once; each needs memory and, even idle, part of a core


class Services:
    """Running services, at most one for each combination of model and flags."""

    def __init__(self):
        self._running = {}

    def url(self, model, flags):
        """Return the URL of a service, which is started if it is not running."""
        stack, url = self._running.pop((model, flags), (None, None))
        if stack is None:
            # The least recently used service is stopped first.
            self._keep(MOST - 1)
            stack = ExitStack()
            url = stack.enter_context(served(model, flags))
        self._running[model, flags] = stack, url
        return url

    def close(self):
        self._keep(0)

    def _keep(self, most):
        while len(self._running) > most:
            stack, _ = self._running.pop(next(iter(self._running)))
            stack.close()


SERVICES = pytest.StashKey[Services]()


@pytest.fixture(scope="session")
def service(pytestconfig, tiny_model_dir):
    """Return a function that takes architecture and flags and returns the URL of a running service."""
    services = pytestconfig.stash[SERVICES] = Services()
    yield lambda arch="llama", flags=SPLIT: services.url(tiny_model_dir(arch), (*ENGINE, *flags))
    services.close()


@pytest.fixture(scope="module")
def hosts():
    """Yield two emulated hosts with a link that a test can cut."""
    try:
        with two_hosts(first_local=True) as joined:
            yield joined
    except ConfigurationError as error:
        pytest.skip(str(error))


def pytest_runtest_teardown(item, nextitem):
    """Stop shared services before tests of other folders start."""
    services = item.config.stash.get(SERVICES, None)
    if services is not None and (nextitem is None or HERE not in nextitem.path.parents):
        services.close()
