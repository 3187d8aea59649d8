"""Parsing of SLOs in the command-line syntax."""

import pytest

from twofold.errors import ConfigurationError
from twofold.slo import SPLITWISE, Slo, parse_slo


def test_parses_names_and_bounds():
    assert parse_slo("Splitwise") is SPLITWISE
    assert (SPLITWISE.ttft, SPLITWISE.tpot) == ({50: 2.0, 90: 3.0, 99: 6.0}, {50: 1.25, 90: 1.5, 99: 5.0})
    assert SPLITWISE.e2e == SPLITWISE.tpot
    assert parse_slo("ttft=2,tpot=0.1") == Slo(ttft_s=2.0, tpot_s=0.1)
    assert parse_slo("ttft=250ms, tpot=1e2 ms, e2e=120s") == Slo(ttft_s=0.25, tpot_s=0.1, e2e_s=120.0)


@pytest.mark.parametrize(
    "text", ["", ",", "ttft", "ttft=-1", "ttft=nan", "ttft=1m", "ttft=1.2.3", "ttft=ms", "ttfb=1", "distserve"]
)
def test_rejects_an_invalid_slo(text):
    with pytest.raises(ConfigurationError, match=r"ttft=2,tpot=0\.1"):
        parse_slo(text)


def test_a_large_number_without_a_unit_is_questioned():
    with pytest.raises(ConfigurationError, match="'ttft=250' has no unit: write ttft=250ms or ttft=250s"):
        parse_slo("ttft=250,tpot=0.1")
