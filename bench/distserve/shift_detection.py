"""Measure the false alarms and the detection delay of the traffic shift detector.

False alarms are counted on stationary traffic at several rates and burstinesses, with prompt and output
lengths as in the Azure traces. The delay between a step in rate, prompt length or output length and the alarm
is measured in requests and in seconds. With `--trace`, the alarms on a recorded trace are listed, too;
recorded traffic does shift, so such an alarm can be correct.
"""

import argparse
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from twofold.scheduling.replan.traffic import Quantity, TrafficMonitor
from twofold.workload.distributions import load_lengths
from twofold.workload.trace import open_trace

RATES = (1.0, 10.0, 50.0)
BURSTINESSES = (1.0, 0.25, 0.1)  # CV of gaps: 1 (Poisson), 2 and 3.2
STATIONARY_S, DEADLINE_S = 3600.0, 3600.0
FACTORS = (2.0, 0.5)


def arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Yield gaps between arrivals in seconds, from a gamma distribution with a given rate and burstiness."""
    draw = random.Random(seed)
    while True:
        yield draw.gammavariate(burstiness, 1 / (rate * burstiness))


def false_alarms(rate: float, burstiness: float, name: str, hours: float, seed: int) -> int:
    """Return the number of alarms during hours of stationary traffic."""
    watch, now, alarms = TrafficMonitor(), 0.0, 0
    for gap, (prompt, output) in zip(arrivals(rate, burstiness, seed), load_lengths(name).sample(seed), strict=False):
        now += gap
        if now > hours * 3600:
            return alarms
        watch.ended(watch.arrived(prompt, now), output)
        if watch.alarmed:
            alarms += 1
            watch.accept(watch.shifts())
    raise AssertionError("both are endless")


def delay(quantity: Quantity, factor: float, rate: float, burstiness: float, seed: int) -> tuple[int, float] | None:
    """Return the detection delay of a traffic shift as (requests, seconds); None if longer than an hour."""
    watch, now, since = TrafficMonitor(), 0.0, 0
    lengths = load_lengths("azure-conv").sample(seed)
    for gap, (prompt, output) in zip(arrivals(rate, burstiness, seed), lengths, strict=False):
        times = factor if now >= STATIONARY_S else 1.0
        now += gap / (times if quantity is Quantity.RATE else 1.0)
        since += now >= STATIONARY_S
        prompt_tokens = round(prompt * (times if quantity is Quantity.PROMPT else 1.0))
        output_tokens = round(output * (times if quantity is Quantity.OUTPUT else 1.0))
        watch.ended(watch.arrived(prompt_tokens, now), output_tokens)
        if now > STATIONARY_S + DEADLINE_S:
            return None
        if watch.alarmed:
            shifts = watch.shifts()
            if now >= STATIONARY_S and any(shift.quantity is quantity for shift in shifts):
                return since, now - STATIONARY_S
            watch.accept(shifts)
    raise AssertionError("both are endless")


def stationary(hours: float, seeds: int) -> Table:
    table = _table("False alarms", ("requests/s", "CV of gaps", "lengths", "hours", "requests", "alarms"))
    for rate in RATES:
        for burstiness in BURSTINESSES:
            for name in ("azure-code", "azure-conv"):
                watched = hours * seeds
                alarms = sum(false_alarms(rate, burstiness, name, hours, seed) for seed in range(seeds))
                cv, requests = f"{burstiness**-0.5:.1f}", f"{watched * 3600 * rate:,.0f}"
                table.add_row(f"{rate:g}", cv, name, f"{watched:g}", requests, str(alarms))
    return table


def steps(seeds: int) -> Table:
    table = _table(
        "Delay from step to alarm",
        ("what", "requests/s", "CV of gaps", "requests P50", "worst", "seconds P50", "worst", "missed"),
    )
    for quantity in Quantity:
        for factor in FACTORS:
            for rate, burstiness in ((10.0, 1.0), (10.0, 0.25), (1.0, 1.0)):
                found = [delay(quantity, factor, rate, burstiness, seed) for seed in range(seeds)]
                known = [each for each in found if each is not None]
                counts, times = [each[0] for each in known], [each[1] for each in known]
                row = (f"{quantity.value} × {factor:g}", f"{rate:g}", f"{burstiness**-0.5:.1f}")
                numbers = (f"{statistics.median(counts):.0f}", f"{max(counts)}")
                seconds = (f"{statistics.median(times):.1f}", f"{max(times):.1f}")
                table.add_row(*row, *numbers, *seconds, str(len(found) - len(known)))
    return table


def recorded(path: Path) -> Table:
    """Return a table of the traffic shifts detected in a recorded trace."""
    table = _table(path.name, ("at s", "what", "before", "after", "since requests", "sigmas"))
    watch = TrafficMonitor()
    for request in open_trace(path):
        watch.ended(watch.arrived(request.prompt_tokens, request.arrival_s), request.output_tokens)
        if watch.alarmed:
            shifts = watch.shifts()
            for shift in shifts:
                numbers = (f"{shift.before:.3g}", f"{shift.after:.3g}", str(shift.requests), f"{shift.sigmas:.1f}")
                table.add_row(f"{request.arrival_s:.0f}", shift.quantity.value, *numbers)
            watch.accept(shifts)
    return table


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0, help="hours per seed")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trace", type=Path, action="append", default=[])
    args = parser.parse_args()
    console = Console(width=110)
    console.print(stationary(args.hours, args.seeds))
    console.print(steps(args.seeds))
    for path in args.trace:
        console.print(recorded(path))


if __name__ == "__main__":
    main()
