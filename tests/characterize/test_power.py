"""Tests of power measurements and power caps with RAPL, on fake kernel files."""

import pytest

from twofold.characterize.power import RaplPower, capped
from twofold.errors import ConfigurationError


@pytest.fixture
def packages(tmp_path):
    """Return the fake RAPL folders of two processor packages."""
    for number in range(2):
        package = tmp_path / f"intel-rapl:{number}"
        package.mkdir()
        (package / "energy_uj").write_text("0")
        (package / "max_energy_range_uj").write_text("1000000")
        (package / "constraint_0_power_limit_uw").write_text("100000000")
    return sorted(tmp_path.iterdir())


def limits(packages):
    return [int((package / "constraint_0_power_limit_uw").read_text()) / 1e6 for package in packages]


def test_a_cap_is_divided_among_the_packages_and_restored(packages):
    power = RaplPower(packages[0].parent)
    assert power.tdp_w == 200
    with capped(power, 120):
        assert limits(packages) == [60, 60]
    assert limits(packages) == [100, 100]


def test_a_cap_that_cannot_be_written_is_one_sentence(packages):
    power = RaplPower(packages[0].parent)
    for package in packages:
        (package / "constraint_0_power_limit_uw").unlink()
        (package / "constraint_0_power_limit_uw").mkdir()
    with pytest.raises(ConfigurationError, match="cannot cap the power at 120 W"), capped(power, 120):
        pass


def test_counters_that_wrap_around_are_read_on(packages):
    """An energy counter that wraps around to 0 is handled."""
    (packages[0] / "energy_uj").write_text("900000")
    power = RaplPower(packages[0].parent)
    (packages[0] / "energy_uj").write_text("100000")
    assert power.watts() > 0


def test_without_counters_there_is_no_power(tmp_path):
    with pytest.raises(LookupError):
        RaplPower(tmp_path)
