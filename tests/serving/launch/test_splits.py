"""Planning of workers with several ranks (tensor and pipeline parallelism)."""

import msgspec
import pytest

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.kvcache.sharding import UNSHARDED, Sharding
from twofold.serving.config import EngineConfig, ServiceConfig, WorkerConfig
from twofold.serving.launch.worker_plan import check_splits, with_chunks, with_splits


def workers(**splits):
    made = [
        WorkerConfig(instance=name, role=role, batcher=role.value, max_num_batched_tokens=64)
        for name, role in (("prefill-0", Role.PREFILL), ("prefill-1", Role.PREFILL), ("decode-0", Role.DECODE))
    ]
    return with_splits(made, {Role(role): split for role, split in splits.items()})


def service(made, **changes):
    config = ServiceConfig(engine=EngineConfig(model="m"), workers=made, run_dir="")
    return msgspec.structs.replace(config, **changes)


def test_each_phase_has_its_degree():
    made = workers(prefill=Sharding(2, 1), decode=Sharding(1, 3))
    assert [w.split.ranks for w in made] == [2, 2, 3]
    assert {w.split for w in workers(prefill=UNSHARDED)} == {UNSHARDED}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"transport": "nixl"}, r"from prefill-0 \(TP1 PP1\) to decode-0 \(TP2 PP1\): use shared_memory"),
        ({"kv_checksums": True}, "--kv-checksums .* decode-0 .* shards"),
        ({"engine": EngineConfig(model="m", swap_bytes=1 << 30)}, "--swap-space .* decode-0 .* shards"),
    ],
)
def test_rejects_settings_that_cannot_reshard(changes, why):
    check_splits(service(workers(decode=Sharding(2, 1))))
    with pytest.raises(ConfigurationError, match=why):
        check_splits(service(workers(decode=Sharding(2, 1)), **changes))
    check_splits(service(workers(), **changes))


def test_pipeline_chunks_need_several_prefill_stages():
    made = with_chunks(workers(prefill=Sharding(1, 2)), 512)
    assert [(w.batcher, w.max_num_batched_tokens) for w in made] == [("prefill-chunks", 512)] * 2 + [("decode", 64)]
    assert with_chunks(workers(), None) == workers()
    for others in (workers(), workers(prefill=Sharding(2, 1)), workers(decode=Sharding(1, 2))):
        with pytest.raises(ConfigurationError, match=r"--pipeline-chunk 512 needs .* several stages"):
            with_chunks(others, 512)


def test_rejects_a_journal_with_pipeline_chunks():
    made = with_chunks(workers(prefill=Sharding(1, 2)), 512)
    check_splits(service(made))
    with pytest.raises(ConfigurationError, match="--journal records one batch at a time"):
        check_splits(service(made, journal_dir="j"))
