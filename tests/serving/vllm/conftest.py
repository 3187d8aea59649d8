"""What tests of workers that run vLLM share: models that it takes, and services on them."""

from contextlib import ExitStack
from importlib.util import find_spec

import pytest

from support.tiny_models import write_tiny_model
from twofold.bench.services import served

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

ENGINE = (
    "--engine",
    "vllm",
    "--dtype",
    "float32",
    "--kv-cache-memory-bytes",
    "64MiB",
    "--max-num-seqs",
    "16",
)


@pytest.fixture(scope="session")
def vllm_model_dir(tmp_path_factory):
    """The directory of a tiny model of an architecture, with heads of a size that vLLM has kernels for."""
    made = {}

    def directory(arch):
        if arch not in made:
            made[arch] = write_tiny_model(arch, tmp_path_factory.mktemp(arch), head_dim=64)
        return made[arch]

    return directory


@pytest.fixture
def vllm_service(vllm_model_dir):
    """The URL of a service for (architecture, flags); two processes of vLLM are as many as fit beside a test."""
    with ExitStack() as running:

        def url(arch, *flags):
            running.close()
            return running.enter_context(served(vllm_model_dir(arch), (*ENGINE, *flags)))

        yield url
