"""Metrics of Twofold and vLLM, read by the fault suite."""

from twofold.torture.metrics import ServiceMetrics, idle_prefills, leaks, parse_metrics

TWOFOLD = """
# TYPE twofold:num_requests_running gauge
twofold:num_requests_running{instance="prefill-0"} 0.0
twofold:num_requests_running{instance="decode-0"} 2.0
twofold:kv_cache_usage_perc{instance="decode-0"} 0.25
twofold:instance_role{instance="prefill-0",role="prefill"} 1.0
twofold:instance_role{instance="prefill-1",role="prefill"} 1.0
twofold:instance_role{instance="decode-0",role="decode"} 1.0
twofold:instance_role{instance="decode-0",role="prefill"} 0.0
twofold:prefix_cache_queries_total{instance="prefill-0"} 48.0
twofold:prefix_cache_queries_created{instance="prefill-0"} 1.7e+09
"""
VLLM = """
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 9.0
"""


def test_reads_load_by_instance_and_prompts_by_prefill_instance():
    found = parse_metrics({"a:1": TWOFOLD})
    assert found.busy == {
        "running requests of prefill-0": 0.0,
        "running requests of decode-0": 2.0,
        "KV usage of decode-0": 0.25,
    }
    assert found.prefilled == {"prefill-0": 48.0, "prefill-1": 0.0}


def test_sums_the_engines_of_a_server():
    found = parse_metrics({"a:1": VLLM, "b:1": VLLM})
    assert found.busy == {"waiting requests of a:1": 2.0, "waiting requests of b:1": 2.0}
    assert found.prefilled == {"a:1": 9.0, "b:1": 9.0}


def test_a_gauge_above_its_idle_value_is_a_leak_and_a_lost_instance_is_none():
    before = ServiceMetrics({"KV usage of a": 0.1, "KV usage of b": 0.1})
    (leak,) = leaks(before, ServiceMetrics({"KV usage of a": 0.2, "KV usage of c": 0.0}))
    assert (leak.gauge, leak.before, leak.after) == ("KV usage of a", 0.1, 0.2)


def test_names_servers_without_new_prompts():
    before, after = ServiceMetrics({}, {"a": 5.0}), ServiceMetrics({}, {"a": 5.0, "b": 0.0, "c": 3.0})
    assert idle_prefills(before, after) == ["a", "b"]
