"""Fixtures with tiny models and engines."""

import pytest

from support.device import DEVICE
from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.loader import load_model
from twofold.engine.torch.pool import KvPool


@pytest.fixture(scope="session")
def loaded(tiny_model_dir):
    """Return a function that loads an architecture's tiny model, once per session."""
    models = {}

    def model(arch):
        if arch not in models:
            models[arch] = load_model(tiny_model_dir(arch)).to(DEVICE)
        return models[arch]

    return model


@pytest.fixture
def engine(loaded):
    """Return a function that creates a torch engine with a new KV pool."""

    def make(arch="llama", num_blocks=320, block_size=16):
        model = loaded(arch)
        return TorchEngine(model, KvPool(model.layout(block_size), num_blocks, device=DEVICE))

    return make
