"""What is said of a choice in tables and on pages."""

from twofold.planning.plan import Choice
from twofold.reporting.simulation.accuracy import phase_accuracy
from twofold.reporting.simulation.facts import check_text
from twofold.reporting.tables import seconds
from twofold.request import Phase
from twofold.simulation.verdict import Check

HEADINGS = (
    "design",
    "req/s",
    "$/h",
    "kW",
    "req/$",
    "req/kWh",
    "TTFT P90",
    "TPOT P90",
    "mean kW",
    "model error (prefill / decode)",
)


def choice_row(choice: Choice) -> tuple[str, ...]:
    """The texts of HEADINGS; latencies and mean power are those at the rate that it was judged at."""
    design, evaluation = choice.design, choice.evaluation
    return (
        design.name,
        rate_text(choice.highest_rate),
        f"{design.price_per_h:,.2f}",
        f"{design.tdp_w / 1e3:,.1f}",
        f"{choice.requests_per_dollar:,.0f}",
        f"{choice.requests_per_kwh:,.0f}",
        seconds(None if evaluation.ttft_s is None else evaluation.ttft_s.p90),
        seconds(None if evaluation.tpot_s is None else evaluation.tpot_s.p90),
        f"{evaluation.mean_power_w / 1e3:,.1f}",
        " / ".join(phase_accuracy(evaluation.pools, phase) for phase in Phase),
    )


def check_texts(check: Check) -> tuple[str, str]:
    """The value and the bound of a check, in its unit: a share, a multiple or seconds."""
    if check.at_least or "slowdown" in check.name:
        return check_text(check)
    return seconds(check.value), f"≤ {seconds(check.bound)}"


def rate_text(rate: float) -> str:
    return f"{rate:,.2f}" if rate < 100.0 else f"{rate:,.0f}"
