"""Hand-offs between instances that shard their KV differently."""

from multiprocessing import Pipe

import msgspec
import pytest
import torch

from twofold.engine.base import KvLayout, LayerShape
from twofold.engine.torch.pool import KvPool
from twofold.errors import ConfigurationError, InstanceLostError
from twofold.kvcache.sharding import UNSHARDED, Sharding
from twofold.transport.base import SCRATCH_BYTES, KvCacheSpec
from twofold.transport.sharded import OtherRanks, RankServer, ShardedTransport
from twofold.transport.shared_memory import SharedMemoryTransport

SHAPES = (LayerShape(4, 8, 4), LayerShape(4, 8, 4), LayerShape(2, 8, 8))  # the last layer has fewer heads
LAYOUT = KvLayout(layers=SHAPES, block_size=4, dtype="float32", itemsize=4)
HEADS_FIRST = msgspec.structs.replace(LAYOUT, heads_first=True)  # as in vLLM
SPLITS = [UNSHARDED, Sharding(2, 1), Sharding(1, 2), Sharding(2, 3)]
BLOCKS = 6
ALL = range(len(SHAPES))


class Instance:
    """All ranks of an instance in one process."""

    def __init__(self, name, split, layout=LAYOUT):
        self.split, self.layout = split, layout
        self.ranks = [
            SharedMemoryTransport(KvCacheSpec(name, 1, layout, BLOCKS), split, rank) for rank in range(split.ranks)
        ]
        self.transport = self.ranks[0]
        if split != UNSHARDED:
            pipes = [self._serve(own) for own in self.ranks[1:]]
            self.transport = ShardedTransport(self.ranks[0], OtherRanks(pipes))

    def _serve(self, own):
        ours, theirs = Pipe()
        RankServer(own, theirs).start(lambda: None)
        return ours

    def views(self, layer):
        """For each rank with layer `layer`, yield the index of its KV heads in blocks, and its keys and values."""
        for rank, own in enumerate(self.ranks):
            held = self.split.layers(rank, len(ALL))
            if layer in held:
                pool, local = own.engine_pool, layer - held.start
                heads = self.split.heads(rank, SHAPES[layer].kv_heads)
                tokens = () if self.layout.heads_first else (slice(None),)
                place = (slice(None), *tokens, slice(heads.start, heads.stop))
                yield place, (pool.keys(local), pool.values(local))

    def fill(self, whole):
        for layer in ALL:
            for place, parts in self.views(layer):
                for part, everything in zip(parts, (whole.keys(layer), whole.values(layer)), strict=True):
                    part.copy_(everything[place])

    def gather(self):
        """Return the KV of all ranks, merged into one unsharded pool."""
        whole = KvPool(self.layout, BLOCKS)
        for layer in ALL:
            for place, parts in self.views(layer):
                for part, everything in zip(parts, (whole.keys(layer), whole.values(layer)), strict=True):
                    everything[place] = part
        return whole


def random_pool(seed, layout):
    generator = torch.Generator().manual_seed(seed)
    pool = KvPool(layout, BLOCKS)
    for layer in ALL:
        for part in (pool.keys(layer), pool.values(layer)):
            part.copy_(torch.rand(part.shape, generator=generator))
    return pool


def check_moved(target, contents, sources, targets, layers):
    """Check that only the given blocks and layers were transferred."""
    found = target.gather()
    expected = KvPool(target.layout, BLOCKS)
    for layer in layers:
        for part, of in ((expected.keys, contents.keys), (expected.values, contents.values)):
            part(layer)[list(targets)] = of(layer)[list(sources)]
    for layer in ALL:
        assert torch.equal(found.keys(layer), expected.keys(layer))
        assert torch.equal(found.values(layer), expected.values(layer))


@pytest.mark.parametrize("source_split", SPLITS, ids=str)
@pytest.mark.parametrize("target_split", SPLITS, ids=str)
@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("layout", [LAYOUT, HEADS_FIRST], ids=["tokens first", "heads first"])
def test_every_byte_arrives_at_its_head_and_layer(source_split, target_split, pulled, layout):
    source, target = Instance("s", source_split, layout), Instance("t", target_split, layout)
    contents = random_pool(1, layout)
    source.fill(contents)
    sources, targets = [0, 1, 5], [3, 4, 2]
    if pulled:
        connection = target.transport.connect(source.transport.descriptor)
        move = connection.read
    else:
        connection = source.transport.connect(target.transport.descriptor)
        move = connection.write
    first = move(range(1), sources, targets)
    check_moved(target, contents, sources, targets, range(1))
    rest = move(range(1, 3), sources, targets)
    check_moved(target, contents, sources, targets, ALL)
    assert first + rest == 3 * LAYOUT.bytes_per_block
    connection.probe(SCRATCH_BYTES)
    connection.close()


def test_any_rank_reports_a_lost_peer():
    source, target = Instance("s", Sharding(1, 2)), Instance("t", Sharding(1, 2))
    gone = msgspec.structs.replace(target.transport.descriptor, others=("/proc/1/fd/987654",))
    with pytest.raises(ConfigurationError, match="cannot open"):
        source.transport.connect(gone)


def test_a_closed_connection_moves_nothing_on_any_rank():
    source, target = Instance("s", Sharding(2, 1)), Instance("t", UNSHARDED)
    connection = source.transport.connect(target.transport.descriptor)
    connection.close()
    with pytest.raises(InstanceLostError, match="closed"):
        connection.write(ALL, [0], [0])
