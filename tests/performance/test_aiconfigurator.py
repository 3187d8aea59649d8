"""The performance model of measured operator times."""

import sys

import msgspec
import pytest

from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.performance.aiconfigurator import (
    BACKENDS,
    Curve,
    EngineConstants,
    EngineLayout,
    aiconfigurator,
    catalog_names,
    operator_tables,
)
from twofold.performance.registry import performance_model

core = pytest.importorskip("aiconfigurator_core", reason="needs the extra aiconfigurator")
LAYOUT = EngineLayout(model="Qwen/Qwen3-32B", system="h100_sxm", backend="vllm", tensor_parallel=2)


@pytest.fixture(scope="module")
def catalog():
    return load_catalog()


@pytest.fixture(scope="module")
def tables():
    return operator_tables(LAYOUT)


@pytest.fixture(scope="module")
def engine():
    from aiconfigurator_core.sdk.engine import EngineHandle

    return EngineHandle.compile("Qwen/Qwen3-32B", "h100_sxm", "vllm", tp_size=2)


def test_a_curve_is_linear_between_and_beyond_its_points():
    curve = Curve([0, 4, 8], [0.0, 4.0, 16.0])
    assert [curve(x) for x in (0, 2, 4, 6, 8, 12)] == pytest.approx([0, 2, 4, 10, 16, 28])


@pytest.mark.parametrize(("prompts", "tokens"), [(1, 100), (1, 3000), (1, 20000), (5, 900), (16, 200)])
def test_prefills_are_those_of_the_package(tables, engine, prompts, tokens):
    """Batches of several prompts have attention of as many token pairs as one prompt with the same attention work."""
    seconds = tables.prefill_s(prompts * tokens, prompts * tokens**2)
    assert seconds == pytest.approx(engine.predict_prefill_latency(prompts, tokens) / 1e3, rel=0.1)


@pytest.mark.parametrize(("decodes", "context"), [(1, 300), (7, 2000), (50, 700), (100, 4000), (400, 1000)])
def test_decodes_are_those_of_the_package(tables, engine, decodes, context):
    cost = tables.decode_cost(decodes)
    seconds = cost.base_s + cost.context_s * decodes * context
    assert seconds == pytest.approx(engine.predict_decode_latency(decodes, context) / 1e3, rel=0.1)


@pytest.mark.parametrize(("tokens", "decodes"), [(512, 8), (2048, 64)])
def test_mixed_iterations_are_those_of_the_package(tables, engine, tokens, decodes):
    seconds = tables.mixed_s(tokens, tokens**2, decodes, decodes * tokens)
    assert seconds == pytest.approx(engine.mixed_step_latency(tokens, decodes, tokens, 2) / 1e3, rel=0.1)


def test_iterations_contain_the_constants_of_the_engine(tables, catalog, monkeypatch):
    constants = EngineConstants(operators=0.5, step_s=0.002, sequence_s=0.0001)
    names = msgspec.structs.replace(catalog_names(), engines={"vllm": constants}, decode_errors={"vllm": 0.1})
    monkeypatch.setattr("twofold.performance.aiconfigurator.catalog_names", lambda: names)
    model = aiconfigurator(catalog.model("qwen3-32b"), catalog.machine("h100"), 2)
    assert model.error.decode == 0.1
    assert model.prefill_s(512, 512**2) == pytest.approx(tables.prefill_s(512, 512**2) / 2 + 0.002)
    found, cost = model.decode_cost(40), tables.decode_cost(40)
    assert (found.base_s, found.context_s) == pytest.approx((cost.base_s / 2 + 0.006, cost.context_s / 2))
    mixed_s = tables.mixed_s(512, 512**2, 40, 40_000)
    assert model.mixed_s(512, 512**2, 40, 40_000) == pytest.approx(mixed_s / 2 + 0.006)


def test_names_of_the_catalog(catalog):
    assert set(catalog_names().models) <= set(catalog.models)
    assert set(catalog_names().systems) <= set(catalog.accelerators)
    assert set(catalog_names().engines) == set(catalog_names().decode_errors) == set(BACKENDS)


def test_engines_differ(catalog):
    pair = catalog.model("llama-3.1-8b"), catalog.machine("h100"), 1
    vllm, sglang = (performance_model(name, *pair) for name in ("aiconfigurator", "aiconfigurator-sglang"))
    assert vllm.decode_cost(8) != sglang.decode_cost(8)
    assert vllm.error.basis.startswith("operators of vllm ")
    assert sglang.error.basis.startswith("operators of sglang ")


def test_spread_experts_have_other_times(catalog):
    """Eight instances that share the experts prefill a prompt slower than one with all accelerators, but together
    they prefill more.
    """
    pair = catalog.model("qwen3-30b-a3b"), catalog.machine("h200")
    shared, whole = performance_model("aiconfigurator", *pair, 1, 1, 8), performance_model("aiconfigurator", *pair, 8)
    assert shared.name.endswith("TP1-EP8")
    one_s, all_s = shared.prefill_s(4096, 4096**2), whole.prefill_s(4096, 4096**2)
    assert all_s < one_s < 8 * all_s


def test_spread_experts_need_experts_and_times(catalog):
    h200 = catalog.machine("h200")
    with pytest.raises(ConfigurationError, match=r"llama-3\.1-8b has no experts"):
        performance_model("aiconfigurator", catalog.model("llama-3.1-8b"), h200, 1, 1, 8)
    with pytest.raises(ConfigurationError, match="roofline has no times of expert parallelism: use one of aiconf"):
        performance_model("roofline", catalog.model("qwen3-30b-a3b"), h200, 1, 1, 8)


@pytest.mark.parametrize(
    ("model", "machine", "reason"),
    [
        ("bloom-176b", "dgx-h100", "no times of model bloom-176b, only of llama-3.1-8b"),
        ("llama-3.1-8b", "mi300x-8", "no times of accelerator mi300x, only of a100-80gb"),
    ],
)
def test_what_was_not_measured_is_refused(catalog, model, machine, reason):
    with pytest.raises(ConfigurationError, match=reason):
        aiconfigurator(catalog.model(model), catalog.machine(machine), 1)


def test_a_missing_package_is_named(catalog, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("aiconfigurator_core")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(ConfigurationError, match=r"pip install twofold\[aiconfigurator\]"):
        aiconfigurator(catalog.model("qwen3-8b"), catalog.machine("h100"), 1)
