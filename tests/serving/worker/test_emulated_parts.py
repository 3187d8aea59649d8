"""Engine, transport and memory of emulated workers."""

import pytest

from support.toy import CATALOG
from twofold.cluster.file import parse_cluster
from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import ClusterSpec
from twofold.errors import ConfigurationError
from twofold.serving.config import DEFAULT_VOCAB_SIZE, EngineConfig, ServiceConfig
from twofold.serving.launch.worker_plan import plan_cluster
from twofold.serving.worker.emulated_parts import prepare


def config(pools="1xa100:prefill,1xh100:decode", model="bloom-176b", **engine):
    spec = ClusterSpec(pools=parse_cluster(pools, model="", catalog=CATALOG).pools, model=model, router="jsq")
    return ServiceConfig(
        engine=EngineConfig(engine="emulated", model=model, **engine),
        workers=plan_cluster(spec, CATALOG, pin_cores=False),
        run_dir="",
        cluster=spec,
    )


def test_memory_equals_the_simulators():
    """An emulated worker has as many KV blocks as the simulated instance."""
    made = config()
    prepared = prepare(made, print)
    for worker, kind in zip(made.workers, instance_profiles(made.cluster, CATALOG), strict=True):
        parts = prepared.parts(worker, epoch=7)
        assert parts.engine.num_blocks == kind.capacity_tokens // 16
        assert parts.engine.layout.bytes_per_token == CATALOG.model("bloom-176b").kv_bytes_per_token
        assert parts.transport.descriptor.epoch == 7
        assert parts.transport.descriptor.layout == parts.engine.layout


def test_sizes_default_to_the_model():
    """The context length defaults to the model's."""
    assert (prepare(config(), print).max_model_len, prepare(config(), print).vocab_size) == (2048, DEFAULT_VOCAB_SIZE)
    told = prepare(config(max_model_len=8192, vocab_size=99), print)
    assert (told.max_model_len, told.vocab_size) == (8192, 99)


def test_refuses_a_context_beyond_the_smallest_memory():
    with pytest.raises(ConfigurationError, match="exceeds the KV cache of an instance on dgx-a100"):
        prepare(config(max_model_len=10_000_000), print)


def test_waiting_pauses_the_engine():
    """When a worker waits for work, its emulated engine is marked as idle."""
    made = config()
    parts = prepare(made, print).parts(made.workers[0], epoch=1)
    parts.engine._busy_until = 5
    with parts.changed:
        parts.changed.wait(timeout=0.001)
    assert parts.engine._busy_until is None
