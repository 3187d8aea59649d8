"""DistServe's latency model, compared with hand calculations and with the output of DistServe's simulator."""

import json

import pytest

from twofold.bench.real_data import find_data
from twofold.errors import ConfigurationError
from twofold.performance.distserve_published import distserve_pipeline, distserve_published

ROUNDED = 1e-5  # these figures have six digits, the table has twelve


@pytest.fixture
def opt_13b(models, machines):
    return distserve_published(models["opt-13b"], machines["dgx-a100"], 1)


def test_prefill_by_hand(opt_13b):
    expected = 18.1025 + 0.101912 * 512 + 7.1223e-6 * 512**2 + 1 + 2 + 1e-4 * 512
    assert expected == pytest.approx(75.1997, abs=1e-3)
    assert opt_13b.prefill_s(512, 512**2) * 1e3 == pytest.approx(expected, rel=ROUNDED)


@pytest.mark.parametrize(
    ("sequences", "a", "b", "c"),
    [(1, 19.9347, 6.2694e-4, 0.038507), (94, 19.9347, 6.2694e-4, 0.038507), (95, 7.1662, 5.798e-4, 0.158311)],
)
def test_decode_by_hand(opt_13b, sequences, a, b, c):
    context = 600 * sequences
    expected = a + b * (context + sequences) + c * sequences + 2 + 1e-4 * context
    cost = opt_13b.decode_cost(sequences)
    assert (cost.base_s + cost.context_s * context) * 1e3 == pytest.approx(expected, rel=ROUNDED)


def test_pipeline_stages_share_the_work(models, machines):
    model = distserve_pipeline(models["opt-66b"], machines["dgx-a100"], 2, 2)
    stage = (43.0588 + 0.274229 * 512 + 2.2478e-5 * 512**2) / 2 + 2
    overhead = 2 + 1e-4 * 512
    assert model.first_stage.prefill_s(512, 512**2) * 1e3 == pytest.approx(stage + overhead, rel=ROUNDED)
    assert model.later_stage.prefill_s(512, 512**2) * 1e3 == pytest.approx(stage, rel=ROUNDED)
    assert model.prefill_s(512, 512**2) * 1e3 == pytest.approx(2 * stage + overhead, rel=ROUNDED)
    decode = (48.288 + 9.4243e-4 * 101 + 0.12755) / 2 + 2 + 1e-4 * 100
    cost = model.first_stage.decode_cost(1)
    assert (cost.base_s + cost.context_s * 100) * 1e3 == pytest.approx(decode, rel=ROUNDED)
    assert model.name == "distserve-published opt-66b on dgx-a100 TP2 PP2"
    with pytest.raises(ConfigurationError, match="pipeline parallelism is 1 to 64, not 0"):
        distserve_pipeline(models["opt-66b"], machines["dgx-a100"], 2, 0)


@pytest.mark.parametrize(
    ("file", "name", "tensor_parallel", "engine"),
    [
        ("golden-distserve-opt-13b-1111-r2-N300.json", "opt-13b", 1, "distserve"),
        ("golden-distserve-opt-13b-2111-r3-N300.json", "opt-13b", 2, "distserve"),
        ("golden-distserve-opt-66b-4122-r4-N300.json", "opt-66b", 4, "distserve"),
        ("golden-vllm-opt-13b-1100-r1-N300.json", "opt-13b", 1, "vllm"),
        ("golden-vllm-opt-66b-4100-r2-N300.json", "opt-66b", 4, "vllm"),
    ],
)
def test_the_first_request_has_the_ttft_of_the_simulator(models, machines, file, name, tensor_parallel, engine):
    path = find_data(f"golden/distserve/{file}")
    if path is None:
        pytest.skip("needs the reference output of DistServe's simulator: set TWOFOLD_DATA")
    first = json.loads(path.read_text())[0]
    model = distserve_published(models[name], machines["dgx-a100"], tensor_parallel, engine=engine)
    tokens = first["prompt_len"]
    assert model.prefill_s(tokens, tokens**2) * 1e3 == pytest.approx(first["ttft_ms"], rel=1e-5)


def test_mixed_adds_the_marginal_cost_of_decodes(opt_13b):
    more = opt_13b.mixed_s(512, 512**2, 10, 5000) - opt_13b.prefill_s(512, 512**2)
    expected = (6.2694e-4 * 5010 + 0.038507 * 10 + 1e-4 * 5000) / 1e3
    assert more == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "machine", "tensor_parallel"), [("opt-13b", "dgx-h100", 1), ("opt-66b", "dgx-a100", 1)]
)
def test_rejects_unpublished_configurations(models, machines, name, machine, tensor_parallel):
    with pytest.raises(ConfigurationError, match="only on a100-80gb of opt-13b TP1, "):
        distserve_published(models[name], machines[machine], tensor_parallel)
    with pytest.raises(ConfigurationError, match="choose one of distserve, vllm"):
        distserve_published(models["opt-13b"], machines["dgx-a100"], 1, engine="tgi")
