"""Parsing of vLLM 0.32's metrics."""

from twofold.serving.upstream.metrics import PrefillTotals, read_metrics

TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 20.0
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 2000.0
vllm:request_prompt_tokens_bucket{engine="0",le="1.0",model_name="m"} 9.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 5.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="m"} 1000.0
vllm:request_prefill_kv_computed_tokens_count{engine="0",model_name="m"} 20.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 61.0
vllm:cache_config_info{block_size="128",engine="0",kv_cache_layout="{odd}",num_gpu_blocks="512"} 1.0
vllm:cache_config_info{block_size="128",engine="1",num_gpu_blocks="512"} 1.0
process_open_fds 100.0
"""


def test_sums_over_engines():
    """Metrics of several vLLM engines behind one address are combined into the metrics of one server."""
    readings = read_metrics(TEXT)
    assert (readings.running, readings.waiting, readings.steps) == (4, 2, 61)
    assert (readings.blocks, readings.block_tokens, readings.capacity_tokens) == (1024, 128, 131072)
    assert readings.used == 0.5
    assert (readings.mean_prompt, readings.prefills) == (100.0, PrefillTotals(5.0, 1000.0, 20.0))


def test_converts_to_an_instance_status():
    status = read_metrics(TEXT).status
    assert (status.waiting, status.running, status.blocks_total, status.blocks_free) == (2, 4, 1024, 512)


def test_missing_metrics_mean_idle():
    """A server that reports none of vLLM's metrics counts as idle, and its capacity is unknown."""
    readings = read_metrics("twofold:num_requests_running 3\n")
    assert (readings.running, readings.capacity_tokens, readings.mean_prompt) == (0, None, 0.0)
    assert readings.status.blocks_free == readings.status.blocks_total == 1
