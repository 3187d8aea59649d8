"""`simulate`: results computed by hand, failures of instances, and invalid input."""

import msgspec
import pytest

from support.toy import CATALOG
from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import SATURATING, ClusterSpec, InstanceFailure, PoolSpec
from twofold.errors import ConfigurationError, WorkloadError
from twofold.instance import Role
from twofold.performance.queueing import saturating_tokens
from twofold.performance.registry import performance_model
from twofold.performance.transfer import TransferModel, default_sync_s
from twofold.request import Request
from twofold.simulation.observers.base import Observer
from twofold.simulation.simulate import simulate
from twofold.timeline import Moment
from twofold.workload.source import workload

SPLIT = ClusterSpec(
    pools=(
        PoolSpec(machines=1, machine="dgx-h100", role=Role.PREFILL),
        PoolSpec(machines=1, machine="dgx-h100", role=Role.DECODE),
    ),
    model="llama2-70b",
)


def one(prompt, output, arrival=0.0, name="a"):
    return Request(id=name, arrival_s=arrival, prompt_tokens=prompt, output_tokens=output)


def model():
    return performance_model("fitted", CATALOG.model("llama2-70b"), CATALOG.machine("dgx-h100"), 8)


class Timelines(Observer):
    def __init__(self):
        self.all = []

    def ended(self, timeline, now):
        self.all.append(timeline)


def timelines(spec, requests):
    seen = Timelines()
    result = simulate(spec, requests, catalog=CATALOG, observers=[seen])
    return result, seen.all


@pytest.mark.parametrize("mode", ["serialized", "layer-wise"])
def test_a_lone_request_takes_the_sum_of_its_parts(mode):
    """The E2E latency of a single request is the sum of the times of its phases."""
    spec = msgspec.structs.replace(SPLIT, handoff=mode)
    _, (timeline,) = timelines(spec, [one(1500, 5)])
    prefill = model().prefill_s(1500, 1500**2)
    machine, llama = CATALOG.machine("dgx-h100"), CATALOG.model("llama2-70b")
    rate = machine.network_bytes_per_s
    transfer = TransferModel(
        kv_bytes_per_token=llama.kv_bytes_per_token, layers=llama.layers, bytes_per_s=rate, sync_s=default_sync_s(rate)
    )
    visible = transfer.serialized_s(1500) if mode == "serialized" else transfer.layer_wise_s(1500, prefill)
    cost = model().decode_cost(1)
    decode = sum(cost.base_s + cost.context_s * (1500 + i) for i in range(4))
    assert timeline.ttft_s == pytest.approx(prefill, rel=1e-9)
    assert timeline.visible_transfer_s == pytest.approx(visible, rel=1e-6)
    assert timeline.e2e_s == pytest.approx(prefill + visible + decode, rel=1e-6)


def test_the_mode_is_chosen_by_size():
    """By default, KV is transferred after the prefill of short prompts and during the prefill of long ones."""
    bloom = msgspec.structs.replace(SPLIT, model="bloom-176b")
    _, (short, long) = timelines(bloom, [one(20, 2), one(4000, 2, arrival=5.0, name="b")])
    assert short.moments[Moment.HANDOFF_STARTED] >= short.moments[Moment.FIRST_TOKEN]
    assert long.moments[Moment.HANDOFF_STARTED] < long.moments[Moment.FIRST_TOKEN]


def test_a_failed_instance_loses_its_requests_and_recovers():
    """Requests on a failed instance fail, and later requests complete after it recovers."""
    spec = msgspec.structs.replace(
        SPLIT, router="jsq", failures=(InstanceFailure(instance="decode-0", at_s=1.0, back_s=3.0),)
    )
    result, ended = timelines(spec, [one(500, 100), one(500, 4, 2.0, "b"), one(500, 4, 4.0, "c")])
    assert (result.failed, result.rejected, result.completed) == (1, 1, 1)
    assert [t.finish_reason.value for t in sorted(ended, key=lambda t: t.request.id)] == ["error", "error", "length"]


def test_rejects_requests_larger_than_every_instance():
    result, _ = timelines(SPLIT, [one(10_000_000, 2), one(10, 2, name="b")])
    assert (result.rejected, result.completed) == (1, 1)


def test_energy_is_idle_power_and_what_batches_draw_on_top():
    """While one instance runs a prefill, the other uses its idle power."""
    result, (timeline,) = timelines(SPLIT, [one(1000, 1)])
    prefill = timeline.ttft_s
    expected = prefill * (model().prefill_w(1000) + model().idle_w)
    assert result.energy_j == pytest.approx(expected, rel=1e-3)


def test_series_show_the_pools_and_the_power():
    """The result has time series of pool sizes, queues, batches and power."""
    result = simulate(SPLIT, workload("azure-conv", rate=2, num_requests=200), catalog=CATALOG)
    assert result.series["pool/prefill"].mean() == pytest.approx(1.0, abs=0.05)
    assert result.series["power_w"].mean() == pytest.approx(result.mean_power_w, rel=0.05)
    assert set(result.series) >= {"queue/prefill", "queue/decode", "batch/prefill", "batch/decode"}


def test_a_result_survives_serialization():
    result = simulate(SPLIT, [one(1000, 10)], catalog=CATALOG)
    again = msgspec.json.decode(msgspec.json.encode(result), type=type(result))
    assert again.e2e_s.percentile(50) == result.e2e_s.percentile(50)


def test_stop_when_leaves_requests_unfinished():
    result = simulate(
        SPLIT,
        workload("azure-conv", rate=2, num_requests=2000),
        catalog=CATALOG,
        stop_when=lambda statistics: statistics.completed >= 100,
    )
    assert 100 <= result.completed < 2000
    assert result.unfinished == result.arrived - result.completed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "gpt-9"}, "gpt-9"),
        ({"router": "fastest"}, "unknown router 'fastest'"),
        ({"handoff": "pigeon"}, "unknown hand-off 'pigeon'"),
        ({"rules": "none"}, "unknown rules 'none'"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be more than 0"),
        ({"max_num_batched_tokens": "auto"}, "needs one of the batchers prefill, mixed"),
        ({"link_bytes_per_s": 0.0}, "link_bytes_per_s must be more than 0"),
        ({"pools": SPLIT.pools[:1]}, "both phases"),
        ({"performance": "crystal-ball"}, "crystal-ball"),
        ({"failures": (InstanceFailure(instance="decode-7", at_s=1.0),)}, "unknown instance 'decode-7'"),
        ({"failures": (InstanceFailure(instance="decode-0", at_s=2.0, back_s=1.0),)}, "back_s must be after at_s"),
        ({"memory_utilization": 0.05}, "llama2-70b needs"),
        (
            {"router": "append", "pools": (SPLIT.pools[0], msgspec.structs.replace(SPLIT.pools[1], batcher="decode"))},
            "the router append prefills on decode instances",
        ),
        (
            {"pools": (PoolSpec(machines=1, machine="dgx-h100", role=Role.MIXED, batcher="magic"),)},
            "unknown batcher 'magic'",
        ),
        (
            {"pools": (PoolSpec(machines=1, machine="dgx-h100", role=Role.MIXED, tensor_parallel=16),)},
            "tensor parallelism",
        ),
    ],
)
def test_rejects_invalid_clusters(change, says):
    spec = msgspec.structs.replace(SPLIT, **change)
    with pytest.raises(ConfigurationError, match=says) as refused:
        simulate(spec, [one(10, 2)], catalog=CATALOG)
    assert "\n" not in str(refused.value)


def test_a_saturating_budget_is_that_of_each_pools_own_machines():
    """If `max_num_batched_tokens` is set to `auto`, the token budget of a prefill pool depends on the
    pool's machine type.
    """
    spec = msgspec.structs.replace(SPLIT, router="jsq", max_num_batched_tokens=SATURATING)
    fast, decode = instance_profiles(spec, CATALOG)
    fits = model()
    tokens = saturating_tokens(lambda n: fits.prefill_s(n, n * n), CATALOG.model("llama2-70b").max_context)
    assert (fast.max_num_batched_tokens, decode.max_num_batched_tokens) == (tokens, 2048)
    requests = [one(100 + 40 * i, 5, 0.001 * i, str(i)) for i in range(40)]
    number = msgspec.structs.replace(spec, max_num_batched_tokens=tokens)
    assert moments(spec, requests) == moments(number, requests)
    slow = msgspec.structs.replace(spec.pools[0], machine="dgx-a100")
    assert (
        instance_profiles(msgspec.structs.replace(spec, pools=(slow, *spec.pools[1:])), CATALOG)[
            0
        ].max_num_batched_tokens
        != tokens
    )


def moments(spec, requests):
    return {timeline.request.id: timeline.moments for timeline in timelines(spec, requests)[1]}


def test_rejects_empty_and_unordered_workloads():
    with pytest.raises(WorkloadError, match="no requests"):
        simulate(SPLIT, [], catalog=CATALOG)
    with pytest.raises(WorkloadError, match="request b arrives at 1 s, before a at 2 s"):
        simulate(SPLIT, [one(10, 2, 2.0), one(10, 2, 1.0, "b")], catalog=CATALOG)
    with pytest.raises(WorkloadError, match="have the id a"):
        simulate(SPLIT, [one(10, 200), one(10, 200)], catalog=CATALOG)
