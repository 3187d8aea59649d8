"""Predicted hand-off times, and link overhead and bandwidth fitted to measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.errors import ConfigurationError
from twofold.performance.fitted import fitted
from twofold.performance.transfer import LinkSpeed, PrefillSpeed, TransferModel, default_sync_s, reshard_path


def transfer(model, machine):
    """Return the transfer model that the simulator uses for a machine's network."""
    speed = machine.network_bytes_per_s
    return TransferModel(
        kv_bytes_per_token=model.kv_bytes_per_token,
        layers=model.layers,
        bytes_per_s=speed,
        sync_s=default_sync_s(speed),
    )


@pytest.mark.parametrize(("name", "visible_ms"), [("dgx-h100", 5.0), ("dgx-a100", 8.0)])
def test_layer_wise_delays_match_the_paper(models, machines, name, visible_ms):
    """A layer-wise KV transfer ends about 5 ms after the prefill on H100 and 8 ms on A100, at any
    prompt length (Splitwise, section 4.3).
    """
    path = transfer(models["bloom-176b"], machines[name])
    model = fitted(models["bloom-176b"], machines[name], 8)
    for tokens in (512, 1024, 1500, 2048):
        seen_ms = path.layer_wise_s(tokens, model.prefill_s(tokens, tokens**2)) * 1e3
        assert seen_ms == pytest.approx(visible_ms, rel=0.15)


def test_the_crossover_on_h100_is_at_512_tokens(models, machines):
    path = transfer(models["bloom-176b"], machines["dgx-h100"])
    model = fitted(models["bloom-176b"], machines["dgx-h100"], 8)
    assert path.crossover_tokens(lambda n: model.prefill_s(n, n * n)) == pytest.approx(512, abs=2)


def test_serialized_by_hand(models, machines):
    """With 4 MB of KV per token, the transfer of 1,500 tokens at 400 GB/s takes 15 ms."""
    path = transfer(models["bloom-176b"], machines["dgx-h100"])
    assert path.serialized_s(1500) == pytest.approx(1500 * 4_014_080 / 400e9)


@given(st.integers(1, 100_000), st.floats(0, 10), st.floats(1e9, 1e12))
def test_layer_wise_hides_at_most_all_but_one_layer(tokens, prefill_s, speed):
    path = TransferModel(kv_bytes_per_token=1000, layers=40, bytes_per_s=speed, latency_s=1e-3)
    seen = path.layer_wise_s(tokens, prefill_s) - path.latency_s
    total = path.serialized_s(tokens) - path.latency_s
    rounding = 1e-9 * total + 1e-15  # a small transfer is the difference of two times close to the latency
    assert total / 40 - rounding <= seen <= total + rounding


@given(st.floats(1e-5, 1e-2), st.floats(1e-6, 1e-3), st.floats(0, 0.02))
def test_the_better_mode_changes_at_the_crossover(sync_s, per_token_s, floor_s):
    path = TransferModel(kv_bytes_per_token=10**6, layers=32, bytes_per_s=1e11, sync_s=sync_s)

    def prefill_s(tokens):
        return floor_s + per_token_s * tokens

    at = path.crossover_tokens(prefill_s)
    assert path.layer_wise_s(at, prefill_s(at)) < path.serialized_s(at)
    if at > 1:
        assert path.layer_wise_s(at - 1, prefill_s(at - 1)) >= path.serialized_s(at - 1)


def test_an_instant_prefill_has_no_crossover():
    path = TransferModel(kv_bytes_per_token=1000, layers=32, bytes_per_s=1e11, sync_s=1e-3)
    assert path.crossover_tokens(lambda _: 0.0) is None


def test_synchronization_is_interpolated_and_clamped():
    assert default_sync_s(50e9) == default_sync_s(200e9) > default_sync_s(300e9) > default_sync_s(400e9)
    assert default_sync_s(1e12) == default_sync_s(400e9)


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"bytes_per_s": 0.0}, {"sync_s": -1.0}])
def test_rejects_impossible_paths(wrong):
    with pytest.raises(ConfigurationError):
        TransferModel(**{"kv_bytes_per_token": 1, "layers": 1, "bytes_per_s": 1.0, **wrong})


@given(st.floats(0, 0.1), st.floats(1e5, 1e11))
def test_fits_overhead_and_bandwidth_of_two_transfers(overhead_s, bytes_per_s):
    sizes = (4096, 4 << 20)
    few, many = ((size, overhead_s + size / bytes_per_s) for size in sizes)
    link = LinkSpeed.fit(few, many)
    if many[1] - few[1] > many[1] * 0.01:
        assert overhead_s * 0.999 <= link.overhead_s <= (overhead_s + sizes[0] / bytes_per_s) * 1.001
        assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)


@given(st.floats(0, 1), st.floats(1e-6, 1))
def test_fits_stay_positive_despite_noise(few_s, many_s):
    link = LinkSpeed.fit((4096, few_s), (4 << 20, many_s))
    assert link.overhead_s >= 0
    assert link.bytes_per_s > 0


def test_a_hand_off_adds_an_overhead_per_layer():
    transfer = LinkSpeed(overhead_s=0.001, bytes_per_s=1e9).transfer(kv_bytes_per_token=8000, layers=5)
    assert (transfer.latency_s, transfer.sync_s) == (0.001, 0.004)
    prefill = PrefillSpeed(fixed_s=0.01, s_per_token=0.0001)
    assert prefill.seconds(100) == pytest.approx(0.02)
    # Each layer but the last saves 1.6 µs × n for n tokens: 4 ms at 625 tokens.
    assert transfer.crossover_tokens(prefill.seconds) == pytest.approx(626, abs=1)


LINK = LinkSpeed(overhead_s=0.001, bytes_per_s=1e6)


def test_one_rank_to_one_is_a_plain_path():
    assert reshard_path(LINK, [100] * 4, [1] * 4) == LINK.transfer(400, 4)


def test_two_ranks_halve_the_time():
    whole, halves = reshard_path(LINK, [100] * 4, [1] * 4), reshard_path(LINK, [50] * 4, [1] * 4)
    assert halves.serialized_s(1000) - 0.001 == pytest.approx((whole.serialized_s(1000) - 0.001) / 2)


def test_every_piece_adds_an_overhead():
    path = reshard_path(LINK, [100] * 4, [2] * 4)
    assert (path.latency_s, path.sync_s) == (0.002, 0.006)
    assert path.kv_bytes_per_token == 400, "same bytes as in one piece"
