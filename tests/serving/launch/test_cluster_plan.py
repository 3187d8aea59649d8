"""Planning of emulated workers from a cluster spec."""

import pytest

from support.toy import CATALOG
from twofold.cluster.file import parse_cluster
from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import ClusterSpec, ControlSpec, InstanceFailure
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.serving.launch.worker_plan import available_cores, plan_cluster
from twofold.simulation.simulate import build_cluster
from twofold.simulation.statistics import RunStatistics


def spec(pools="2xh100:prefill,1xh100@4:decode", **fields):
    settings = {"model": "llama2-70b", "router": "jsq", **fields}
    return ClusterSpec(pools=parse_cluster(pools, model="", catalog=CATALOG).pools, **settings)


def workers(made, *, pin_cores=False):
    return plan_cluster(made, CATALOG, pin_cores=pin_cores)


def test_each_simulated_instance_becomes_a_worker():
    made = spec("2xh100:prefill,1xh100@4:decode,1xa100:mixed")
    kinds = instance_profiles(made, CATALOG)
    virtual = build_cluster(made, CATALOG, kinds, RunStatistics(None, None, over_all_tokens=False), [], 1)
    assert [(w.instance, w.role) for w in workers(made)] == [
        (name, instance.role) for name, instance in virtual.instances.items()
    ]
    assert [w.instance for w in workers(made)] == ["prefill-0", "prefill-1", "decode-0", "decode-1", "mixed-0"]


def test_a_pools_batcher_overrides_its_roles():
    made = spec("1xh100:prefill,1xh100:decode,1xh100:mixed/chunked-prefill", max_num_batched_tokens=1024)
    assert {w.role: w.batcher for w in workers(made)} == {
        Role.PREFILL: "prefill",
        Role.DECODE: "decode",
        Role.MIXED: "chunked-prefill",
    }
    assert {w.max_num_batched_tokens for w in workers(made)} == {1024}


def test_emulated_workers_may_share_cores():
    assert not any(w.cores for w in workers(spec()))
    assert all(w.cores for w in workers(spec(), pin_cores=True))


@pytest.mark.parametrize(("limit", "threads"), [("1", 1), ("1000000", None), ("", None), ("0", None), ("4,2", None)])
def test_omp_num_threads_limits_threads(monkeypatch, limit, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    (worker,) = workers(spec("1xh100:mixed"))
    assert worker.threads == (threads or len(available_cores()))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"router": "splitwise-sim"}, "is for simulations"),
        ({"rules": "splitwise-sim"}, "rules twofold"),
        ({"control": ControlSpec(controllers=2), "router": "jsq"}, "a service has one controller"),
        ({"cells": 2, "router": "cells:jsq"}, "each host is a cell"),
        ({"failures": (InstanceFailure(instance="decode-0", at_s=1),)}, "for simulations only"),
        ({"model": "bloom-175b"}, "bloom-176b"),
        ({"handoff": "by-mail"}, "by-size"),
        ({"pools": "1xh100:prefill"}, "both phases"),
        ({"pools": "1xh100@1ep8:mixed"}, "expert parallelism is for simulations only"),
    ],
)
def test_rejects_clusters_that_only_a_simulator_can_run(fields, said):
    with pytest.raises(ConfigurationError, match=said):
        workers(spec(**fields))
