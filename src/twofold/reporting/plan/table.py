"""Plans as terminal tables: best designs, SLO margins, Pareto front and advice."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from twofold.planning.advice import Advice
from twofold.planning.deployment import margins, model_accuracy
from twofold.planning.design import Design, RatedDesign
from twofold.planning.evaluator import Effort
from twofold.planning.plan import DesignChoice, Plan
from twofold.reporting.output import table
from twofold.reporting.simulation.facts import check_text
from twofold.reporting.simulation.statistics import extrapolations, phase_accuracy
from twofold.reporting.summary import NOTHING, rate_text, seconds
from twofold.request import Phase
from twofold.simulation.result import Check

_NARROW = ("design", "req/s", "$/h", "kW", "req/$", "req/kWh")  # a terminal of 80 columns has no room for others
HEADINGS = (*_NARROW, "TTFT P90", "TPOT P90", "mean kW", "model error (prefill / decode)")
_MOST_POINTS = 14  # the JSON has the whole front


def choice_row(choice: DesignChoice) -> tuple[str, ...]:
    """Format a design as a table row with the columns HEADINGS."""
    # Latencies and mean power are at `choice.rate`, which may be below the highest rate.
    design, evaluation = choice.design, choice.evaluation
    return (
        design.name,
        rate_text(choice.highest_rate),
        _price(design),
        f"{design.tdp_w / 1e3:,.1f}",
        NOTHING if choice.requests_per_dollar is None else f"{choice.requests_per_dollar:,.0f}",
        NOTHING if choice.requests_per_kwh is None else f"{choice.requests_per_kwh:,.0f}",
        seconds(None if evaluation.ttft_s is None else evaluation.ttft_s.p90),
        seconds(None if evaluation.tpot_s is None else evaluation.tpot_s.p90),
        f"{evaluation.mean_power_w / 1e3:,.1f}" if evaluation.mean_power_w else NOTHING,
        " / ".join(phase_accuracy(evaluation.pools, phase) for phase in Phase),
    )


def _price(design: Design) -> str:
    return f"{design.price_per_h:,.2f}" if design.price_per_h else NOTHING


def check_texts(check: Check) -> tuple[str, str]:
    """Format the value and the bound of an SLO check."""
    if check.at_least or "slowdown" in check.name:
        return check_text(check)
    return seconds(check.value), f"≤ {seconds(check.bound)}"


def plan_tables(plan: Plan, advice: Advice, front: Sequence[RatedDesign], effort: Effort, title: str) -> Group:
    """Return terminal output that shows a plan, its recommendation, and the number of simulations."""
    parts: list[RenderableType] = [Text(advice.text, style="bold"), _choices(plan, title)]
    for what, groups in (("Cannot meet the SLO", plan.without), ("No room in the budget", plan.no_room)):
        if groups:
            parts.append(Text(f"{what}: {', '.join(groups)}."))
    parts += [*map(_margins, plan.best_of_both), _front(front), *_errors(plan.choices)]
    parts += [Text(f"Extrapolated for {text}") for text in extrapolation_texts(plan.best_of_both)]
    parts.append(Text(effort_text(effort)))
    return Group(*parts)


def extrapolation_texts(choices: Iterable[DesignChoice]) -> Iterator[str]:
    """Describe the prompts and batches in the simulations of designs that are larger than any measured."""
    for choice in choices:
        evaluation = choice.evaluation
        for text in extrapolations(evaluation.pools, evaluation.longest_prompt):
            yield f"{choice.design.name}: {text}"


def effort_text(effort: Effort) -> str:
    """Summarize the effort of a plan in a line: new simulations, reused results and CPU time."""
    reused = f", {effort.reused:,} reused" if effort.reused else ""
    speed = effort.requests_per_cpu_s
    pace = "" if speed is None else f": {speed:,.0f} requests per CPU second"
    spent = f"{effort.requests:,} requests in {effort.cpu_s:,.1f} CPU s"
    return f"{effort.simulations:,} simulations{reused}; {spent}{pace}"


def thinned(front: Sequence[RatedDesign], most: int = _MOST_POINTS) -> list[RatedDesign]:
    """Return at most `most` points of a Pareto front at even intervals, with the first and the last."""
    if len(front) <= most:
        return list(front)
    return [front[round(index * (len(front) - 1) / (most - 1))] for index in range(most)]


def _choices(plan: Plan, title: str) -> Table:
    drawn = table(title, _NARROW, range(1, len(_NARROW)))
    drawn.columns[0].overflow = "fold"
    best = (plan.best_split, plan.best_colocated)
    for choice in plan.choices:
        style = "bold" if choice in best else None
        drawn.add_row(*map(escape, choice_row(choice)[: len(_NARROW)]), style=style)
    return drawn


def _margins(choice: DesignChoice) -> Table:
    title = f"Margins of {choice.design.name} at {rate_text(choice.rate)} req/s"
    checks = choice.evaluation.checks
    rows = (
        (check.name, *check_texts(check), "-" if margin.headroom is None else f"{margin.headroom:.1%}")
        for check, margin in zip(checks, margins(checks), strict=True)
    )
    return table(title, ("check", "value", "bound", "headroom"), (1, 2, 3), rows)


def _errors(choices: Iterable[DesignChoice]) -> Iterator[Text]:
    """Yield a line for each performance model of the designs, with its errors."""
    pools = chain.from_iterable(choice.evaluation.pools for choice in choices)
    return map(Text, dict.fromkeys(map(model_accuracy, pools)))


def _front(front: Sequence[RatedDesign]) -> Table:
    shown = thinned(front)
    more = f" ({len(shown)} of {len(front)} points)" if len(shown) < len(front) else ""
    rows = (
        (rate_text(each.rate), _price(each.design), f"{each.design.tdp_w / 1e3:,.1f}", each.design.name)
        for each in shown
    )
    return table(f"Pareto front{more}, on the draw of the search", ("req/s", "$/h", "kW", "design"), (0, 1, 2), rows)
