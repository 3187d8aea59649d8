"""KV caches and layers of vLLM workers with several ranks."""

import msgspec
import pytest

from twofold.engine.base import KvLayout, LayerShape
from twofold.errors import ModelError
from twofold.instance import Role
from twofold.kvcache.sharding import Sharding
from twofold.serving.config import WorkerConfig
from twofold.serving.worker.vllm.split import SplitBridge, rank_cache

SPLIT = Sharding(tensor=2, pipeline=2)
SHAPE = LayerShape(kv_heads=2, key_dim=8, value_dim=0)
OWN = KvLayout((SHAPE,), block_size=4, dtype="float32", itemsize=4, heads_first=True)


def cache(rank):
    spec = WorkerConfig(instance="d", role=Role.DECODE, batcher="decode", max_num_batched_tokens=64, split=SPLIT)
    return rank_cache(spec, rank, 7, num_layers=3)


def test_a_ranks_cache_describes_the_whole_model():
    """The descriptor has all heads of all layers; the pool has the rank's own."""
    transport = cache(3)(OWN, 5)
    assert transport.descriptor.layout.kv_heads == [4, 4, 4]
    assert transport.descriptor.epoch == 7
    assert transport.engine_pool.layout == OWN
    transport.close()


@pytest.mark.parametrize("layers", [(SHAPE, SHAPE), (SHAPE, LayerShape(1, 8, 0))], ids=["stage", "shape"])
def test_refuses_layers_that_the_plan_does_not_expect(layers):
    with pytest.raises(ModelError, match="layers have KV of one shape"):
        cache(3)(msgspec.structs.replace(OWN, layers=layers), 5)


def test_a_layer_is_reported_when_all_shards_have_computed_it():
    """Iterations that overlap are counted apart, and nothing of them is kept."""
    reported = []

    class Sender:
        def layer_computed(self, request_ids, layer):
            reported.append((request_ids, layer))

    class State:
        sender = Sender()

    bridge = SplitBridge(cache(0), SPLIT, 3)
    bridge.bind(State(), None)
    for layer in range(3):
        bridge.report_layer(["a", "b"], layer)
    bridge.report_layer(["c"], 0)
    assert reported == []
    for layer in range(3):
        bridge.report_layer(["a", "b"], layer)
    assert reported == [(("a", "b"), layer) for layer in range(3)]
    assert list(bridge._progress) == [("c",)]
