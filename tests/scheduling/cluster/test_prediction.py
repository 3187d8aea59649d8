"""Prefill and transfer times predicted by a performance model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.toy import CATALOG, ToyModel
from twofold.performance.registry import performance_model
from twofold.performance.reuse import layer_wise
from twofold.performance.transfer import TransferModel
from twofold.scheduling.cluster.forecast import ModelPrediction

TRANSFER = TransferModel(kv_bytes_per_token=1000, layers=10, bytes_per_s=1e6, latency_s=0.5)
ROOFLINE = performance_model("roofline", CATALOG.model("llama-3.1-70b"), CATALOG.machine("dgx-a100"), 8)


def test_reused_tokens_load_beside_the_computation():
    toy = ModelPrediction(ToyModel(base=0), TRANSFER, load_token_s=1e-4)
    assert toy.prefill_s(1000) == pytest.approx(1.0)
    assert toy.prefill_s(1000, 600) == pytest.approx(layer_wise(10, 0.06, 0.4))
    assert toy.prefill_s(1000, 600) == toy.prefill_s(1000, 600), "the second time from memory"


def test_transfer_time_has_latency_and_bandwidth():
    toy = ModelPrediction(ToyModel(), TRANSFER, load_token_s=0.0)
    assert toy.transfer_s(2000) == pytest.approx(2.5)
    assert toy.transfer_s(0) == 0.0


@given(st.integers(2, 120_000), st.data())
def test_reuse_never_slows_a_prefill_with_fast_memory(tokens, data):
    less = data.draw(st.integers(0, tokens - 1))
    more = data.draw(st.integers(less, tokens - 1))
    model = ModelPrediction(ROOFLINE, TRANSFER, load_token_s=327_680 / 252e9)
    assert model.prefill_s(tokens, more) <= model.prefill_s(tokens, less) * 1.02
