"""Machines and models for tests of performance models."""

import msgspec
import pytest

from twofold.bench.real_data import find_data
from twofold.hardware.specs import Accelerator, Machine, Model
from twofold.performance.coefficients import ENVIRONMENT

WHENCE = {"source": "made for tests", "date": "2025-01-01"}
A100 = Accelerator(
    name="a100-80gb",
    memory_bytes=80 << 30,
    memory_bytes_per_s=2.039e12,
    flops_per_s=312e12,
    interconnect_bytes_per_s=300e9,
    tdp_w=400.0,
    **WHENCE,
)
H100 = Accelerator(
    name="h100-80gb",
    memory_bytes=80 << 30,
    memory_bytes_per_s=3.352e12,
    flops_per_s=989e12,
    interconnect_bytes_per_s=450e9,
    tdp_w=700.0,
    **WHENCE,
)
DGX_A100 = Machine(
    name="dgx-a100",
    accelerator=A100,
    count=8,
    network_bytes_per_s=200e9,
    price_per_h=17.6,
    tdp_w=6500.0,
    idle_w=1500.0,
    **WHENCE,
)
DGX_H100 = Machine(
    name="dgx-h100",
    accelerator=H100,
    count=8,
    network_bytes_per_s=400e9,
    price_per_h=38.0,
    tdp_w=10200.0,
    idle_w=2000.0,
    **WHENCE,
)
CAPPED = msgspec.structs.replace(DGX_H100, name="dgx-h100-capped", power_cap=0.5, tdp_w=7400.0)


def dense(name, layers, hidden, heads, kv_heads, parameters, weight_bytes=None):
    return Model(
        name=name,
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        parameters=parameters,
        active_parameters=parameters,
        weight_bytes=weight_bytes or int(2 * parameters),
        **WHENCE,
    )


@pytest.fixture(scope="session")
def machines():
    return {machine.name: machine for machine in (DGX_A100, DGX_H100, CAPPED)}


@pytest.fixture(scope="session")
def models():
    made = (
        dense("bloom-176b", 70, 14336, 112, 112, 176e9, 329_000_000_000),
        dense("llama2-70b", 80, 8192, 64, 8, 69e9),
        dense("opt-13b", 40, 5120, 40, 40, 13e9),
        dense("opt-66b", 64, 9216, 72, 72, 66e9),
        dense("tiny-1b", 16, 2048, 16, 4, 1e9),
    )
    return {model.name: model for model in made}


@pytest.fixture(scope="session")
def profile_path():
    """Return the path of the published Splitwise profile; skip the test if the file is absent."""
    path = find_data("profiles/splitwise-perf-model.csv")
    if path is None:
        pytest.skip("needs the Splitwise profile: set TWOFOLD_DATA")
    return path


@pytest.fixture(autouse=True)
def _no_calibrations_of_ones_own(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
