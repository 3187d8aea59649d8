"""Shared memory between real processes."""

import os

import pytest
import torch

from twofold.engine.base import KvLayout, LayerShape
from twofold.engine.torch.pool import KvPool
from twofold.errors import ConfigurationError
from twofold.serving.worker.landing import Landing
from twofold.transport.memory import SharedMemory
from twofold.transport.shared_memory import SharedMemoryTransport

LAYOUT = KvLayout(layers=(LayerShape(2, 8, 4),) * 3, block_size=4, dtype="float32", itemsize=4)
BLOCKS = 6


def side(name, layout=LAYOUT):
    memory = SharedMemory.create(name, layout.pool_bytes(BLOCKS))
    pool = KvPool(layout, BLOCKS, memory.tensor())
    return SharedMemoryTransport(name, 1, memory, pool, BLOCKS), pool


# The child copies numbers and leaves: it takes no lock that a thread of ours may hold.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_another_process_writes_straight_into_leased_blocks():
    """The writer maps the target's memory by its descriptor; only the named blocks of the layer change."""
    target, pool = side("decode")
    pid = os.fork()
    if pid == 0:  # the other process: it has no pool of ours but what the descriptor opens
        source, source_pool = side("prefill")
        for part in (source_pool.keys(1), source_pool.values(1)):
            part.copy_(torch.arange(BLOCKS)[:, None, None, None].expand_as(part).float())
        moved = source.connect(target.descriptor).write(1, [2, 3, 5], [4, 0, 1])
        os._exit(0 if moved == 3 * LAYOUT.layer_bytes_per_block(1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for part in (pool.keys(1), pool.values(1)):
        assert part[:, 0, 0, 0].tolist() == [3, 5, 0, 0, 2, 0]
        assert (part == part[:, :1, :1, :1]).all()
    assert not pool.keys(0).any()
    assert not pool.keys(2).any()


def test_a_peer_with_another_layout_is_refused():
    """Its bytes would mean something else."""
    ours, _ = side("decode")
    other = KvLayout(layers=LAYOUT.layers, block_size=8, dtype="float32", itemsize=4)
    theirs, _ = side("prefill", other)
    with pytest.raises(ConfigurationError, match="block size differ"):
        theirs.connect(ours.descriptor)


def test_memory_that_is_gone_cannot_be_opened():
    """A restarted peer has new memory; the old address says so."""
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        SharedMemory.open(f"/proc/{os.getpid()}/fd/987654", 4096)


def test_landed_blocks_are_brought_into_a_pool_elsewhere():
    """What an accelerator's worker does before the next batch: every layer of exactly these blocks."""
    _, landing_pool = side("decode")
    engine_pool = KvPool(LAYOUT, BLOCKS)
    for layer in range(3):
        landing_pool.keys(layer).fill_(layer + 1.0)
        landing_pool.values(layer).fill_(layer + 1.0)
    landing = Landing(landing_pool, engine_pool)
    landing.landed("a", [1, 2])
    landing.landed("b", [4])
    landing.drop("b")
    landing.bring(landing.take())
    for layer in range(3):
        assert engine_pool.keys(layer)[:, 0, 0, 0].tolist() == [0, layer + 1, layer + 1, 0, 0, 0]
    assert landing.take() == []
