"""Fixtures for tests with vLLM workers: models and services."""

from contextlib import ExitStack
from importlib.util import find_spec

import pytest

from support.tiny_models import write_tiny_model
from twofold.bench.services import served

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

ENGINE = ("--engine", "vllm", "--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--max-num-seqs", "16")


@pytest.fixture(scope="session")
def vllm_model_dir(tmp_path_factory):
    """Return a function that creates a tiny vLLM-compatible model and returns the model's directory."""
    made = {}

    def directory(arch):
        if arch not in made:
            made[arch] = write_tiny_model(arch, tmp_path_factory.mktemp(arch), head_dim=64)
        return made[arch]

    return directory


@pytest.fixture
def vllm_service(vllm_model_dir):
    """Yield a function that starts a service and returns its URL; each call ends the service of the previous call."""
    with ExitStack() as running:

        def url(arch, *flags):
            running.close()
            return running.enter_context(served(vllm_model_dir(arch), (*ENGINE, *flags)))

        yield url
