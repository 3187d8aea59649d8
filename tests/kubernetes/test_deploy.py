"""Conversion of plans to Helm values: replicas, flags and node labels."""

import pytest

from support.deployments import PLAN
from twofold.cluster.file import read_cluster
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.kubernetes.deploy import merged, values_from, values_of

CATALOG = load_catalog()


def planned(text, **more):
    return values_from(read_cluster(text, "plan.yaml", catalog=CATALOG), CATALOG, text, **{"emulated": False} | more)


def test_pools_become_workers():
    """Each planned instance becomes a GPU worker, which runs on a node of the planned machine type."""
    values = values_of(planned(PLAN))
    prefill, decode, mixed = values.workers.prefill, values.workers.decode, values.workers.mixed
    assert (prefill.replicas, decode.replicas, mixed.replicas) == (3, 2, 0)
    assert prefill.node_selector == {"twofold/machine": "dgx-a100"}
    assert decode.node_selector == {"twofold/machine": "dgx-h100"}
    assert prefill.device == "cuda"
    assert prefill.resources == {"limits": {"nvidia.com/gpu": 1}}
    assert 40e9 < int(prefill.kv_cache_memory) < 80e9
    assert values.plan == PLAN


def test_policies_become_flags():
    values = values_of(
        planned(PLAN + "max_num_batched_tokens: auto\nhandoff: pull\nmax_num_seqs: 99\nswap_space_bytes: 8000000000\n")
    )
    serve = values.serve
    assert (serve.router, serve.handoff, serve.max_num_seqs) == ("jsq", "pull", 99)
    assert serve.max_num_batched_tokens == "auto"
    assert serve.swap_space == 8000000000


def test_colocated_pools_become_mixed_workers():
    pool = "- {machines: 1, machine: dgx-a100, role: mixed, tensor_parallel: 1%s}\n"
    head = "model: llama-3.1-8b\nrouter: jsq\npools:\n"
    whole, chunked = planned(head + pool % ""), planned(head + pool % ", batcher: chunked-prefill")
    assert values_of(whole).workers.mixed.replicas == 8
    assert values_of(whole).workers.prefill.replicas == 0
    assert values_of(whole).serve.batcher == "mixed=mixed"
    assert values_of(chunked).serve.batcher == "mixed=chunked-prefill"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("role: decode, tensor_parallel: 1", "role: decode, tensor_parallel: 4"), "have 4 accelerators"),
        (
            ("pools:\n", "pools:\n- {machines: 1, machine: dgx-a100, role: prefill, tensor_parallel: 1}\n"),
            "second pool of prefill",
        ),
    ],
)
def test_rejects_pools_that_pods_cannot_serve(change, sentence):
    with pytest.raises(ConfigurationError, match=rf"pools\[\d\]: .*{sentence}"):
        planned(PLAN.replace(*change))


def test_emulation_needs_only_the_plan():
    """A plan with several accelerators per instance can be emulated."""
    text = PLAN.replace("tensor_parallel: 1", "tensor_parallel: 2")
    assert planned(text, emulated=True) == {"engine": "emulated", "plan": text}


def test_merges_values_like_helm():
    """Mappings are merged key by key; lists and scalars are replaced."""
    below, above = {"a": {"b": 1, "c": [1, 2]}, "d": 1}, {"a": {"c": [3]}, "d": {"e": 2}}
    assert merged(below, above) == {"a": {"b": 1, "c": [3]}, "d": {"e": 2}}
