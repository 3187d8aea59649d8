"""Prometheus metrics."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.timelines import SPLIT_MOMENTS, request_timeline
from twofold.instance import Role
from twofold.request import FinishReason, Request
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.messages import HandoffReport
from twofold.serving.telemetry.snapshot import AttemptStage, InstanceState
from twofold.serving.telemetry.telemetry import Telemetry
from twofold.slo import Slo


@pytest.fixture
def telemetry():
    return Telemetry("tiny", slo=Slo(ttft_s=2.0))


@pytest.fixture
def value(telemetry):
    """Return a function that finds the value of a metric by name and labels."""

    def find(name, **labels):
        for family in text_string_to_metric_families(telemetry.exposition().decode()):
            for sample in family.samples:
                if sample.name == f"twofold:{name}" and sample.labels == labels:
                    return sample.value
        return None

    return find


def test_a_request_is_observed_once(telemetry, value):
    telemetry.ended(request_timeline([4.0, 6.0, 7.0], **SPLIT_MOMENTS), 7.0)
    for name, seconds in {
        "time_to_first_token_seconds": 3.0,
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_queue_time_seconds": 0.5,
        "request_decode_time_seconds": 3.0,
        "request_time_per_output_token_seconds": 1.5,
        "e2e_request_latency_seconds": 6.0,
        "kv_transfer_seconds": 2.0,
        "kv_transfer_visible_seconds": 0.5,
    }.items():
        assert (value(f"{name}_sum"), value(f"{name}_count")) == (seconds, 1), name
    assert (value("inter_token_latency_seconds_sum"), value("inter_token_latency_seconds_count")) == (3.0, 2)
    assert (value("prompt_tokens_total"), value("generation_tokens_total")) == (10, 3)
    assert value("request_success_total", finished_reason="length") == 1
    assert value("request_slo_total", met="false") == 1


def test_an_aborted_request_has_no_e2e_latency(telemetry, value):
    telemetry.ended(request_timeline([], reason=FinishReason.ABORT), 7.0)
    assert value("request_success_total", finished_reason="abort") == 1
    assert (value("e2e_request_latency_seconds_count"), value("prompt_tokens_total")) == (0, 0)


def test_instance_gauges_end_with_the_instance(telemetry, value):
    telemetry.instances.status("d", InstanceStatus(1, 2, 3, 4, 5, 10, 4, 2))
    assert value("kv_cache_usage_perc", instance="d") == 0.6
    assert (value("num_requests_running", instance="d"), value("num_requests_waiting", instance="d")) == (2, 1)
    assert value("kv_leases", instance="d") == 3
    assert value("num_requests", instance="d", state="lease_queue") == 5
    telemetry.instances.remove("d")
    assert value("num_requests_running", instance="d") is None
    assert value("instance_state", instance="d", state="lost") == 1


def test_swap_counters_span_restarts(telemetry, value):
    for moved in (10, 30):
        status = InstanceStatus(0, 3, 0, 0, 0, 10, 4, 0, 2, moved // 10, 100, 90, moved)
        telemetry.instances.status("d", status)
    assert value("num_requests", instance="d", state="swapped") == 2
    assert [value("swap_blocks", instance="d", state=state) for state in ("total", "free")] == [100, 90]
    assert (value("swaps_total", instance="d"), value("swap_blocks_moved_total", instance="d")) == (3, 30)
    telemetry.instances.remove("d")
    telemetry.instances.status("d", status)
    assert value("swap_blocks_moved_total", instance="d") == 60


def test_prefix_cache_counters_span_restarts(telemetry, value):
    telemetry.instances.prefilled("p", 100, 0)
    telemetry.instances.prefilled("p", 100, 64)
    status = InstanceStatus(0, 0, 0, 0, 0, 10, 10, 0, blocks_cached=4, blocks_evicted=3, blocks_pinned=2)
    for _ in range(2):
        telemetry.instances.status("p", status)
        assert value("kv_cache_blocks", instance="p", state="cached") == 4
        assert value("kv_cache_blocks", instance="p", state="pinned") == 2
        telemetry.instances.remove("p")
    assert value("prefix_cache_queries_total", instance="p") == 200
    assert value("prefix_cache_hits_total", instance="p", tier="engine") == 64
    assert value("prefix_cache_evictions_total", instance="p", tier="engine", reason="capacity") == 6


def test_one_role_is_set_and_changes_are_counted(telemetry, value):
    for role in (Role.PREFILL, Role.PREFILL, Role.MIXED):
        telemetry.instances.role("p", role)
    assert [value("instance_role", instance="p", role=role.value) for role in Role] == [0, 0, 1]
    assert value("role_moves_total", instance="p", from_role="prefill", to_role="mixed") == 1


def test_one_state_is_set(telemetry, value):
    for state in (InstanceState.UP, InstanceState.HALF_OPEN):
        telemetry.instances.state("p", state)
    shown = [value("instance_state", instance="p", state=state.value) for state in InstanceState]
    assert sum(shown) == 1
    assert value("instance_state", instance="p", state="half-open") == 1


def test_a_restarted_instance_is_starting(telemetry, value):
    telemetry.instances.role("p", Role.PREFILL)
    telemetry.instances.remove("p")
    telemetry.instances.restarted("p")
    shown = {state.value for state in InstanceState if value("instance_state", instance="p", state=state.value)}
    assert shown == {"starting"}


def test_service_wide_counters(telemetry, value):
    telemetry.handoff(HandoffReport(instance="p", request_id="r", started_s=1.0, ended_s=2.0, bytes_moved=7))
    telemetry.count_rejection(Request(id="r", arrival_s=0.0, prompt_tokens=1, output_tokens=1), "queue-full")
    telemetry.replayed("r", "p", AttemptStage.HANDOFF)
    telemetry.deadline_missed()
    telemetry.held.set(3)
    telemetry.instances.restarted("p")
    assert value("kv_transfer_bytes_total") == 7
    assert value("admission_rejections_total", reason="queue_full") == 1
    assert value("worker_restarts_total", instance="p") == 1
    assert [value(n) for n in ("request_deadline_misses_total", "num_requests_held")] == [1, 3]
    replays = {stage.value: value("request_replays_total", stage=stage.value) for stage in AttemptStage}
    assert replays == {"prompt": 0, "hand-off": 1, "decode": 0}


def test_all_metrics_have_the_prefix_and_a_description(telemetry):
    exposition = telemetry.exposition().decode()
    assert all(name.startswith("twofold:") for name in re.findall(r"^# HELP (\S+)", exposition, re.MULTILINE))
    assert not re.search(r"^# HELP \S+ *$", exposition, re.MULTILINE)
