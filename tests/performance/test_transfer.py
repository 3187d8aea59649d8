"""Hand-off times, and the crossover that the Splitwise paper saw."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.errors import ConfigurationError
from twofold.performance.fitted import fitted
from twofold.performance.transfer import TransferModel, default_sync_s


def transfer(model, machine):
    """As the simulator would make it."""
    speed = machine.network_bytes_per_s
    return TransferModel(
        kv_bytes_per_token=model.kv_bytes_per_token,
        layers=model.layers,
        bytes_per_s=speed,
        sync_s=default_sync_s(speed),
    )


@pytest.mark.parametrize(("name", "visible_ms"), [("dgx-h100", 5.0), ("dgx-a100", 8.0)])
def test_layer_wise_leaves_what_the_paper_saw(models, machines, name, visible_ms):
    """About 5 ms on H100 and 8 ms on A100, whatever the prompt (section 4.3)."""
    path = transfer(models["bloom-176b"], machines[name])
    model = fitted(models["bloom-176b"], machines[name], 8)
    for tokens in (512, 1024, 1500, 2048):
        seen_ms = path.layer_wise_s(tokens, model.prefill_s(tokens, tokens**2)) * 1e3
        assert seen_ms == pytest.approx(visible_ms, rel=0.15)


def test_on_h100_the_crossover_is_at_512_tokens(models, machines):
    """Below, a serialized hand-off leaves less to wait for."""
    path = transfer(models["bloom-176b"], machines["dgx-h100"])
    model = fitted(models["bloom-176b"], machines["dgx-h100"], 8)
    assert path.crossover_tokens(lambda n: model.prefill_s(n, n * n)) == pytest.approx(512, abs=2)


def test_serialized_by_hand(models, machines):
    """1,500 tokens of 4 MB at 400 GB/s are 15 ms."""
    path = transfer(models["bloom-176b"], machines["dgx-h100"])
    assert path.serialized_s(1500) == pytest.approx(1500 * 4_014_080 / 400e9)


@given(st.integers(1, 100_000), st.floats(0, 10), st.floats(1e9, 1e12))
def test_layer_wise_hides_at_most_all_but_one_layer(tokens, prefill_s, speed):
    """And never less than nothing."""
    path = TransferModel(kv_bytes_per_token=1000, layers=40, bytes_per_s=speed, latency_s=1e-3)
    seen = path.layer_wise_s(tokens, prefill_s) - path.latency_s
    total = path.serialized_s(tokens) - path.latency_s
    rounding = 1e-9 * total + 1e-15  # a tiny transfer is the difference of two numbers near its latency
    assert total / 40 - rounding <= seen <= total + rounding


@given(st.floats(1e-5, 1e-2), st.floats(1e-6, 1e-3), st.floats(0, 0.02))
def test_the_crossover_is_where_the_better_mode_changes(sync_s, per_token_s, floor_s):
    """Serialized wins right below it and layer-wise at it."""
    path = TransferModel(kv_bytes_per_token=10**6, layers=32, bytes_per_s=1e11, sync_s=sync_s)

    def prefill_s(tokens):
        return floor_s + per_token_s * tokens

    at = path.crossover_tokens(prefill_s)
    assert path.layer_wise_s(at, prefill_s(at)) < path.serialized_s(at)
    if at > 1:
        assert path.layer_wise_s(at - 1, prefill_s(at - 1)) >= path.serialized_s(at - 1)


def test_without_anything_to_hide_there_is_no_crossover():
    """A prefill that takes no time hides nothing."""
    path = TransferModel(kv_bytes_per_token=1000, layers=32, bytes_per_s=1e11, sync_s=1e-3)
    assert path.crossover_tokens(lambda _: 0.0) is None


def test_synchronisation_between_and_beyond_the_measured_networks():
    """A straight line between, and no guess beyond."""
    assert default_sync_s(50e9) == default_sync_s(200e9) > default_sync_s(300e9) > default_sync_s(400e9)
    assert default_sync_s(1e12) == default_sync_s(400e9)


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"bytes_per_s": 0.0}, {"sync_s": -1.0}])
def test_impossible_paths_are_refused(wrong):
    """One sentence."""
    with pytest.raises(ConfigurationError):
        TransferModel(**{"kv_bytes_per_token": 1, "layers": 1, "bytes_per_s": 1.0, **wrong})
