"""KV capacity is what weights leave."""

import msgspec
import pytest

from twofold.errors import ConfigurationError
from twofold.performance.instance import kv_capacity_tokens, resident_kv_bytes_per_token


def test_bloom_on_eight_a100_is_what_splitwise_sim_has(models, machines):
    """8 × 80 GiB less 329e9 bytes, at 4,014,080 bytes a token."""
    assert models["bloom-176b"].kv_bytes_per_token == 4_014_080
    assert kv_capacity_tokens(models["bloom-176b"], machines["dgx-a100"], 8, 1.0) == 89_234


def test_utilization_and_an_override_count(models, machines):
    """Less memory, larger tokens."""
    model, machine = models["llama2-70b"], machines["dgx-h100"]
    full = kv_capacity_tokens(model, machine, 4, 1.0)
    assert kv_capacity_tokens(model, machine, 4, 0.9) < full
    assert kv_capacity_tokens(model, machine, 4, 1.0, 8 * 327_680) == full // 8


def test_weights_that_do_not_fit_are_one_sentence(models, machines):
    """What is needed, what is there, and what would be right."""
    with pytest.raises(
        ConfigurationError, match=r"bloom-176b needs 329 GB .* 2x a100-80gb have 172 GB: use more"
    ):
        kv_capacity_tokens(models["bloom-176b"], machines["dgx-a100"], 2, 1.0)
    with pytest.raises(ConfigurationError, match="of which 45% may be used"):
        kv_capacity_tokens(models["bloom-176b"], machines["dgx-a100"], 8, 0.45)


def test_a_pipeline_holds_what_its_largest_stage_holds(models, machines):
    """70 layers on 3 stages: 24 of them, with that share of the weights and of each token's KV."""
    model, machine = models["bloom-176b"], machines["dgx-a100"]
    weights, token = -(-329_000_000_000 * 24 // 70), -(-4_014_080 * 24 // 70)
    expected = (4 * (80 << 30) - weights) // token
    assert kv_capacity_tokens(model, machine, 4, 1.0, pipeline_parallel=3) == expected
    with pytest.raises(
        ConfigurationError, match="a stage of 35 layers of bloom-176b needs 164 GB for its weights"
    ):
        kv_capacity_tokens(model, machine, 1, 1.0, pipeline_parallel=2)
    with pytest.raises(ConfigurationError, match="pipeline parallelism is 1 to 70, not 71"):
        kv_capacity_tokens(model, machine, 8, 1.0, pipeline_parallel=71)


@pytest.mark.parametrize(("utilization", "kv"), [(0.0, None), (1.1, None), (0.9, 0)])
def test_shares_and_sizes_are_checked(models, machines, utilization, kv):
    """Nothing above all of the memory, nothing below one byte."""
    with pytest.raises(ConfigurationError):
        kv_capacity_tokens(models["llama2-70b"], machines["dgx-a100"], 8, utilization, kv)


def test_heads_that_cannot_be_split_are_stored_again(models):
    """8 KV heads over 8 accelerators once, over 16 twice; a latent vector on each."""
    llama = models["llama2-70b"]
    assert [resident_kv_bytes_per_token(llama, parallel) for parallel in (1, 8, 16)] == [
        327_680,
        327_680,
        655_360,
    ]
    latent = msgspec.structs.replace(llama, kv_latent_dims=576)
    assert resident_kv_bytes_per_token(latent, 4) == 4 * latent.kv_bytes_per_token
