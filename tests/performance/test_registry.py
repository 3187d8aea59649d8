"""Choice of a performance model by name."""

import subprocess
import sys

import pytest

from twofold.errors import ConfigurationError
from twofold.performance.registry import PERFORMANCE_MODELS, performance_model


def test_lists_all_models():
    assert set(PERFORMANCE_MODELS) == {
        "auto",
        "fitted",
        "roofline",
        "aiconfigurator",
        "aiconfigurator-sglang",
        "aiconfigurator-trtllm",
        "splitwise-published",
        "distserve-published",
        "distserve-published-vllm",
    }


def test_auto_prefers_measurements(models, machines):
    measured = performance_model("auto", models["bloom-176b"], machines["dgx-a100"], 8)
    estimated = performance_model("auto", models["bloom-176b"], machines["dgx-a100"], 4)
    assert (measured.name, measured.error.estimated) == ("fitted bloom-176b on dgx-a100 TP8", False)
    assert (estimated.name, estimated.error.estimated) == ("roofline bloom-176b on dgx-a100 TP4", True)


@pytest.mark.parametrize(
    ("name", "model", "machine", "parallel"),
    [
        ("fitted", "llama2-70b", "dgx-h100", 4),
        ("splitwise-published", "llama2-70b", "dgx-h100", 4),
        ("distserve-published", "opt-13b", "dgx-a100", 2),
        ("roofline", "tiny-1b", "dgx-h100", 1),
    ],
)
def test_every_model_has_positive_times_and_watts(models, machines, name, model, machine, parallel):
    made = performance_model(name, models[model], machines[machine], parallel)
    assert made.name == f"{name} {model} on {machine} TP{parallel}"
    cost = made.decode_cost(4)
    answers = (
        made.prefill_s(100, 10_000),
        cost.base_s,
        made.mixed_s(100, 10_000, 4, 4000),
        *made.uncontended(100, 20),
        made.idle_w,
        made.prefill_w(100),
        made.decode_w(4),
    )
    assert min(answers) > 0
    assert cost.context_s >= 0
    assert made.error.basis


def test_rejects_an_unknown_name(models, machines):
    with pytest.raises(ConfigurationError, match="unknown performance model 'fited': choose one of auto, fitted"):
        performance_model("fited", models["bloom-176b"], machines["dgx-a100"], 8)


def test_does_not_import_numpy():
    code = "import sys, twofold.performance.registry; print([m for m in ('numpy', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
