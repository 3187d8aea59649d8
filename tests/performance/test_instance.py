"""KV capacity and pipeline stages of an instance."""

import msgspec
import pytest

from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.performance.instance import boundary_bandwidth, by_layers, kv_capacity_tokens, resident_kv_bytes_per_token
from twofold.performance.registry import PERFORMANCE_MODELS, performance_model


def test_capacity_of_bloom_on_eight_a100_matches_splitwise_sim(models, machines):
    assert models["bloom-176b"].kv_bytes_per_token == 4_014_080
    assert kv_capacity_tokens(models["bloom-176b"], machines["dgx-a100"], 8, 1.0) == 89_234


def test_utilization_and_token_size_change_the_capacity(models, machines):
    model, machine = models["llama2-70b"], machines["dgx-h100"]
    full = kv_capacity_tokens(model, machine, 4, 1.0)
    assert kv_capacity_tokens(model, machine, 4, 0.9) < full
    assert kv_capacity_tokens(model, machine, 4, 1.0, 8 * 327_680) == full // 8


def test_rejects_weights_that_do_not_fit(models, machines):
    with pytest.raises(ConfigurationError, match=r"bloom-176b needs 329 GB .* 2x a100-80gb have 172 GB: use more"):
        kv_capacity_tokens(models["bloom-176b"], machines["dgx-a100"], 2, 1.0)
    with pytest.raises(ConfigurationError, match="of which 45% may be used"):
        kv_capacity_tokens(models["bloom-176b"], machines["dgx-a100"], 8, 0.45)


def test_the_largest_stage_bounds_the_capacity_of_a_pipeline(models, machines):
    model, machine = models["bloom-176b"], machines["dgx-a100"]
    # The largest of 3 stages has 24 of 70 layers.
    weights, token = -(-329_000_000_000 * 24 // 70), -(-4_014_080 * 24 // 70)
    expected = (4 * (80 << 30) - weights) // token
    assert kv_capacity_tokens(model, machine, 4, 1.0, pipeline_parallel=3) == expected
    with pytest.raises(ConfigurationError, match="a stage of 35 layers of bloom-176b needs 164 GB for weights"):
        kv_capacity_tokens(model, machine, 1, 1.0, pipeline_parallel=2)
    with pytest.raises(ConfigurationError, match="pipeline parallelism is 1 to 70, not 71"):
        kv_capacity_tokens(model, machine, 8, 1.0, pipeline_parallel=71)


def test_spread_experts_leave_more_memory_to_each_instance():
    """An instance on one of eight accelerators holds all other weights, and an eighth of the experts."""
    catalog = load_catalog()
    model, machine = catalog.model("deepseek-v3"), catalog.machine("h200")
    memory = machine.accelerator.memory_bytes
    token = resident_kv_bytes_per_token(model, 1)
    experts = model.weight_bytes * model.expert_parameters / model.parameters
    held = model.weight_bytes - experts * 7 / 8
    tokens = kv_capacity_tokens(model, machine, 1, 1.0, expert_parallel=8)
    assert tokens == pytest.approx((memory - held) / token, rel=1e-4)


@pytest.mark.parametrize(("utilization", "kv"), [(0.0, None), (1.1, None), (0.9, 0)])
def test_rejects_invalid_shares_and_sizes(models, machines, utilization, kv):
    with pytest.raises(ConfigurationError):
        kv_capacity_tokens(models["llama2-70b"], machines["dgx-a100"], 8, utilization, kv)


def test_replicates_heads_that_cannot_be_sharded(models):
    llama = models["llama2-70b"]
    # On 16 accelerators, each of 8 KV heads is stored twice.
    assert [resident_kv_bytes_per_token(llama, parallel) for parallel in (1, 8, 16)] == [327_680, 327_680, 655_360]
    latent = msgspec.structs.replace(llama, kv_latent_dims=576)
    assert resident_kv_bytes_per_token(latent, 4) == 4 * latent.kv_bytes_per_token


@pytest.fixture
def whole(models, machines):
    return performance_model("fitted", models["bloom-176b"], machines["dgx-a100"], 8)


def test_stages_take_their_share_of_the_time(models, machines, whole):
    halves = by_layers(whole, models["bloom-176b"], machines["dgx-a100"], 8, 2, boundary_bytes_per_s=1e9)
    sent_s = 100 * 14336 * 2 / 1e9
    alone_s = whole.prefill_s(100, 10_000)
    assert halves.first_stage.prefill_s(100, 10_000) == pytest.approx(alone_s / 2)
    assert halves.later_stage.prefill_s(100, 10_000) == pytest.approx(alone_s / 2 + sent_s)
    assert halves.prefill_s(100, 10_000) == pytest.approx(alone_s + sent_s)
    mixed_s = whole.mixed_s(100, 10_000, 5, 500)
    assert halves.mixed_s(100, 10_000, 5, 500) == pytest.approx(mixed_s + 105 * 14336 * 2 / 1e9)
    one, two = whole.decode_cost(4), halves.decode_cost(4)
    assert two.base_s == pytest.approx(one.base_s + 4 * 14336 * 2 / 1e9)
    assert two.context_s == pytest.approx(one.context_s)
    assert halves.stages == 2


def test_all_stages_are_timed_as_the_largest(models, machines, whole):
    quarters = by_layers(whole, models["bloom-176b"], machines["dgx-a100"], 8, 4, boundary_bytes_per_s=1e30)
    # The largest of 4 stages has 18 of 70 layers.
    assert quarters.first_stage.prefill_s(100, 10_000) == pytest.approx(18 / 70 * whole.prefill_s(100, 10_000))


def test_activations_use_interconnect_or_network(models, machines):
    """Activations between pipeline stages use the interconnect within a machine, and the network between machines."""
    machine, model = machines["dgx-a100"], models["bloom-176b"]
    assert boundary_bandwidth(machine, 4, across=False) == 4 * 300e9
    assert boundary_bandwidth(machine, 4, across=True) == 100e9
    for parallel, bytes_per_s in ((4, 4 * 300e9), (8, 200e9)):
        made = performance_model("roofline", model, machine, parallel, 2)
        sent_s = made.later_stage.prefill_s(512, 0) - made.first_stage.prefill_s(512, 0)
        assert sent_s == pytest.approx(512 * 14336 * 2 / bytes_per_s)


def test_draws_the_power_of_one_busy_stage(models, machines, whole):
    halves = by_layers(whole, models["bloom-176b"], machines["dgx-a100"], 8, 2)
    assert halves.idle_w == 2 * whole.idle_w
    assert halves.prefill_w(100) == whole.prefill_w(100) + whole.idle_w
    assert halves.decode_w(3) == whole.decode_w(3) + whole.idle_w


def test_a_pipeline_is_marked_as_estimated(models, machines, whole):
    halves = performance_model("fitted", models["bloom-176b"], machines["dgx-a100"], 8, 2)
    assert halves.name == "fitted bloom-176b on dgx-a100 TP8 PP2"
    assert halves.error.estimated
    assert halves.error.basis == f"{whole.error.basis}; divided by layers among stages"


def test_one_stage_is_the_instance_itself(models, machines, whole):
    made = performance_model("fitted", models["bloom-176b"], machines["dgx-a100"], 8, 1)
    assert (made.stages, made.name) == (1, whole.name)
    assert made.first_stage is made
    assert made.later_stage is made


@pytest.mark.parametrize("stages", [0, 71])
def test_rejects_more_stages_than_layers(models, machines, stages):
    for name in ("fitted", "roofline", "auto"):
        with pytest.raises(ConfigurationError, match=f"70 layers, so pipeline parallelism is 1 to 70, not {stages}"):
            performance_model(name, models["bloom-176b"], machines["dgx-a100"], 8, stages)


def test_rejects_pipelines_of_models_without_them(models, machines):
    with pytest.raises(ConfigurationError, match="does not support pipelines"):
        performance_model("splitwise-published", models["bloom-176b"], machines["dgx-a100"], 8, 2)
    for name in ("distserve-published", "distserve-published-vllm"):
        assert name in PERFORMANCE_MODELS
        made = performance_model(name, models["opt-13b"], machines["dgx-a100"], 1, 2)
        assert made.name == f"{name} opt-13b on dgx-a100 TP1 PP2"


def test_more_stages_trade_latency_for_throughput(models, machines):
    model, machine = msgspec.structs.replace(models["bloom-176b"], layers=72), machines["dgx-a100"]
    made = [performance_model("roofline", model, machine, 8, stages) for stages in (1, 2, 4, 8)]
    times = [each.prefill_s(1000, 1000**2) for each in made]
    stage_times = [each.later_stage.prefill_s(1000, 1000**2) for each in made]
    assert times == sorted(times)
    assert stage_times == sorted(stage_times, reverse=True)
