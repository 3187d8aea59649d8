"""Hand-off policies, which choose the KV transfer mode of each request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.scheduled import request
from twofold.events import Route
from twofold.handoff import HandoffMode
from twofold.performance.transfer import TransferModel
from twofold.scheduling.cluster.scheduler import HANDOFF_POLICIES, AutoHandoff, BySizeHandoff, TransferPaths

ROUTE = Route("p0", "d0")
KV = 1000  # bytes per token


class Given(TransferPaths):
    """Stub of the KV transfer paths between instances."""

    def __init__(self, crossovers=None, transfer=None, s_per_token=0.0):
        super().__init__(crossovers)
        self.path, self.s_per_token = transfer, s_per_token

    def transfer(self, prefill, decode):
        return self.path

    def prefill_s(self, prefill, tokens):
        return tokens * self.s_per_token


def path(bytes_per_s=1e6, overhead_s=0.0, layers=10):
    sync_s = (layers - 1) * overhead_s
    return TransferModel(
        kv_bytes_per_token=KV, layers=layers, bytes_per_s=bytes_per_s, latency_s=overhead_s, sync_s=sync_s
    )


@given(st.integers(1, 10_000), st.integers(0, 10_000))
def test_by_size_sends_long_prompts_by_layer(prompt, crossover):
    mode = BySizeHandoff(Given({"p0": crossover})).choose(request("a", prompt), ROUTE)
    assert mode is (HandoffMode.LAYER_WISE if prompt >= crossover else HandoffMode.SERIALIZED)


def test_by_size_uses_the_crossover_of_the_prefill_instance():
    policy = BySizeHandoff(Given({"p0": 512, "p1": 1024}))
    modes = [policy.choose(request("a", prompt=700), Route(name, "d0")) for name in ("p0", "p1")]
    assert modes == [HandoffMode.LAYER_WISE, HandoffMode.SERIALIZED]


@pytest.mark.parametrize(
    ("name", "mode"),
    [("serialized", HandoffMode.SERIALIZED), ("layer-wise", HandoffMode.LAYER_WISE), ("pull", HandoffMode.PULL)],
)
def test_fixed_policies_ignore_the_request(name, mode):
    policy = HANDOFF_POLICIES[name].build(Given())
    assert {policy.choose(request("a", prompt), ROUTE) for prompt in (1, 100_000)} == {mode}


@given(st.integers(1, 5000), st.floats(1e4, 1e9), st.floats(0, 0.01), st.floats(0, 0.01))
def test_auto_minimizes_the_visible_transfer(prompt, bytes_per_s, overhead_s, s_per_token):
    transfer = path(bytes_per_s, overhead_s)
    mode = AutoHandoff(Given(transfer=transfer, s_per_token=s_per_token)).choose(request("a", prompt), ROUTE)
    waits = {
        HandoffMode.SERIALIZED: transfer.serialized_s(prompt),
        HandoffMode.LAYER_WISE: transfer.layer_wise_s(prompt, prompt * s_per_token),
    }
    assert waits[mode] == min(waits.values())


def test_auto_counts_outstanding_bytes():
    policy = AutoHandoff(Given(transfer=path(1e6, overhead_s=0.01), s_per_token=0.001))
    assert policy.choose(request("a", prompt=1000), ROUTE) is HandoffMode.LAYER_WISE
    for name in "bcd":
        assert policy.choose(request(name, prompt=1000), ROUTE) is HandoffMode.SERIALIZED
    assert policy.choose(request("e", prompt=1000), Route("p0", "d1")) is HandoffMode.LAYER_WISE
    for name in "abcd":
        policy.ended(name)
    assert policy.choose(request("f", prompt=1000), ROUTE) is HandoffMode.LAYER_WISE


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 100), st.sampled_from(["d0", "d1"])), unique_by=lambda x: x[0]
    )
)
def test_no_bytes_are_outstanding_after_all_handoffs(some):
    policy = AutoHandoff(Given(transfer=path()))
    for name, prompt, decode in some:
        policy.choose(request(name, prompt), Route("p0", decode))
    assert sum(policy.outstanding.values()) == KV * sum(prompt for _, prompt, _ in some)
    for name in "abcab":
        policy.ended(name)
    assert policy.outstanding == {}


def test_auto_uses_layer_wise_on_unknown_paths():
    assert AutoHandoff(Given()).choose(request("a"), ROUTE) is HandoffMode.LAYER_WISE
