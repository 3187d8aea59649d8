"""Edge cases of the `shared_memory` transport."""

import os

import pytest

from twofold.engine.base import KvLayout, LayerShape
from twofold.engine.torch.pool import KvPool
from twofold.errors import ConfigurationError
from twofold.serving.worker.torch_parts import StagedLanding
from twofold.transport.memory import SharedMemory

LAYOUT = KvLayout(layers=(LayerShape(2, 8, 4),) * 3, block_size=4, dtype="float32", itemsize=4)
BLOCKS = 6


def test_rejects_the_memory_of_an_ended_process():
    with pytest.raises(ConfigurationError, match="cannot open"):
        SharedMemory.open(f"/proc/{os.getpid()}/fd/987654", 4096)


def test_copies_received_blocks_to_the_engine_pool():
    landing_pool = KvPool(LAYOUT, BLOCKS)
    engine_pool = KvPool(LAYOUT, BLOCKS)
    for layer in range(3):
        landing_pool.keys(layer).fill_(layer + 1.0)
        landing_pool.values(layer).fill_(layer + 1.0)
    landing = StagedLanding(landing_pool, engine_pool)
    landing.received("a", [1, 2])
    landing.received("b", [4])
    landing.drop("b")
    landing.copy(landing.take())
    for layer in range(3):
        assert engine_pool.keys(layer)[:, 0, 0, 0].tolist() == [0, layer + 1, layer + 1, 0, 0, 0]
    assert landing.take() == []
