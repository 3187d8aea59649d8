"""Settings and fixtures shared by all tests."""

import os
import secrets
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests share few cores with other tests and with the services they start. There, several threads of torch that wait
# for each other are much slower than one. torch reads this variable when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"
# Ray clusters require this token; without it, Ray would write a token to the home directory.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

# A slow machine is no error, so examples have no time limit. Examples are the same in every run, so that a failure
# comes from a change of the code; HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile(
    "explore", parent=settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("repeat", parent=settings.get_profile("explore"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


def pytest_collection_modifyitems(items):
    """Start end-to-end tests first under pytest-xdist, because they take longest."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path.parent.name != "serving")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    """Return a function that creates a tiny model of a given architecture and returns its directory."""
    from support.tiny_models import write_tiny_model  # imports torch, which most tests do not need

    made: dict[str, Path] = {}

    def directory(arch: str) -> Path:
        if arch not in made:
            made[arch] = write_tiny_model(arch, tmp_path_factory.mktemp(arch))
        return made[arch]

    return directory
