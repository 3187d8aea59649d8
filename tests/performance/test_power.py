"""Power by phase, batch size and power cap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.performance.coefficients import power_law
from twofold.performance.fitted import fitted
from twofold.performance.power import instance_power
from twofold.performance.roofline import roofline


def test_saturated_prefill_draws_the_tdp_of_the_machine(models, machines):
    model = fitted(models["bloom-176b"], machines["dgx-h100"], 8)
    assert model.prefill_w(4096) == pytest.approx(10_200)
    assert model.idle_w == 2000


def test_decode_draws_the_measured_share(models, machines):
    model = fitted(models["bloom-176b"], machines["dgx-a100"], 8)
    # 63.5% of the accelerators' TDP, plus the TDP of the rest of the machine.
    assert model.decode_w(1) == pytest.approx(0.635 * 3200 + 3300, rel=1e-3)


def test_decode_power_grows_slowly_with_the_batch(models, machines):
    """A decode batch of 16 draws at most 10% more power than a batch of one."""
    model = fitted(models["bloom-176b"], machines["dgx-a100"], 8)
    assert model.decode_w(1) < model.decode_w(16) < 1.1 * model.decode_w(1)


def test_a_cap_cuts_prefill_and_spares_decode(models, machines):
    pair = models["llama2-70b"], 8
    free, capped = (roofline(pair[0], machines[name], pair[1]) for name in ("dgx-h100", "dgx-h100-capped"))
    assert free.prefill_w(4096) - capped.prefill_w(4096) == pytest.approx(2800)
    assert capped.decode_w(1) == pytest.approx(free.decode_w(1))


def test_half_a_machine_draws_half(models, machines):
    whole, half = (
        instance_power(machines["dgx-a100"], parallel, memory_share=0.4, decode_share=0.5) for parallel in (8, 4)
    )
    for watts in (lambda power: power.idle_w, lambda power: power.prefill_w(300), lambda power: power.decode_w(7)):
        assert watts(half) == pytest.approx(watts(whole) / 2)


@given(st.integers(0, 10_000), st.integers(0, 600), st.floats(0.01, 2.0))
def test_watts_stay_between_idle_and_tdp(machines, tokens, sequences, share):
    for machine in machines.values():
        power = instance_power(machine, 8, memory_share=share)
        for watts, size in ((power.prefill_w, tokens), (power.decode_w, sequences)):
            assert machine.idle_w <= watts(size) <= watts(size + 1) <= machine.tdp_w * (1 + 1e-9)


def test_the_power_law_has_a_source_and_errors():
    law = power_law()
    assert "Splitwise" in law.source
    assert max(law.decode_error, law.prefill_error) < 0.1
