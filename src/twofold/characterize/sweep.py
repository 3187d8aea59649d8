"""Sweep of an instance: run timed requests within a time budget, and append the measurements to a CSV profile.

A few probes suffice to measure how much slower an instance has become since its sweep.
"""

import csv
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import geometric_mean, median
from typing import Final

import msgspec

from twofold.characterize.power import PowerMeter
from twofold.characterize.probes import ProbeKind, SweepProbe, mean_prompt, probes, speed_probes
from twofold.characterize.rows import measurements, rows_of
from twofold.characterize.target import Target, TargetLimits
from twofold.errors import ConfigurationError, require
from twofold.performance.fitting.iterations import FEWEST, KINDS, median_measurements
from twofold.performance.fitting.profile import ProfileRow, consistent_rows, read_profile
from twofold.performance.profile import MeasuredProfile

_PASSES: Final = 5  # repeats of each probe, if the budget allows
_MOST_OF_BUDGET: Final = 12  # no probe may take more than this part of the budget
_LONG: Final = 200  # tokens from which the time of a prefill grows with its tokens
_TIMED: Final = {  # column that only this kind of probe measures
    ProbeKind.MIXED: "mixed_time",
    ProbeKind.CACHED: "cached_time",
    ProbeKind.TRANSFER: "transfer_time",
    ProbeKind.IDLE: "cold_time",
    ProbeKind.DECODE: "token_time",
}
_WARM_UPS: Final = (ProbeKind.PREFILL, ProbeKind.DECODE, ProbeKind.TRANSFER)
_NAMES: Final = ProfileRow.__struct_fields__
_SPEED_PASSES: Final = 3

OnProbe = Callable[[str, float], None]


class ProfileFile:
    """A profile (CSV file) to which a sweep appends rows."""

    def __init__(self, path: Path, pair: tuple[str, str, int]) -> None:
        """Open the file. Raises ConfigurationError if it is not a profile, or has rows of another model or hardware."""
        self.rows = list(read_profile(path)) if path.exists() and path.stat().st_size else []
        for row in self.rows:
            require(
                row.pair == pair,
                f"{path} has measurements of {row.model} on {row.hardware} TP{row.tensor_parallel}: name another file",
            )
        self.path = path

    def append(self, rows: Sequence[ProfileRow]) -> None:
        """Append rows to the CSV file, and write a header first if the file is empty."""
        try:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, _NAMES)
                if not self.rows:
                    writer.writeheader()
                writer.writerows(_cells(row) for row in rows)
        except OSError as error:
            raise ConfigurationError(f"cannot write {self.path}: {error.strerror}") from error
        self.rows += rows


def _cells(row: ProfileRow) -> dict[str, object]:
    return {name: value for name in _NAMES if (value := getattr(row, name)) not in (None, 0, 0.0)}


def sweep(
    target: Target, file: ProfileFile, pair: tuple[str, str, int], budget_s: float, on_probe: OnProbe, meter: PowerMeter
) -> None:
    """Measure an instance with probes for about `budget_s` seconds, and append the measured rows to `file`.

    `on_probe` is called with the next probe's name and the elapsed fraction of `budget_s`. Raises TargetError if
    a probe fails; `file` then contains the rows of the earlier probes.
    """
    wanted = probes(target.limits)
    _warm_up(target, wanted, on_probe)
    began = time.monotonic()
    ran: list[SweepProbe] = []

    def run(probe: SweepProbe) -> None:
        on_probe(probe.name, (time.monotonic() - began) / budget_s)
        time.sleep(probe.idle_s)
        with meter.measuring() as power:
            times = target.run(probe.streams)
        shared = {"average_power": power.average, "peak_power": power.peak, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
        rows = rows_of(probe, times, target.limits, pair)
        file.append([msgspec.structs.replace(row, **shared) for row in rows])
        ran.append(probe)

    for probe in _left(wanted, file.rows):
        if time.monotonic() - began > budget_s:
            break
        if _expected_s(probe, file.rows) <= budget_s / _MOST_OF_BUDGET:
            run(probe)
    # If the rows do not suffice for a fit, more probes run beyond the budget.
    for probe in sorted((each for each in wanted if each not in ran), key=attrgetter("tokens")):
        if _suffice(file.rows, target.limits, ran):
            break
        run(probe)


def _warm_up(target: Target, wanted: Sequence[SweepProbe], on_probe: OnProbe) -> None:
    # An accelerator loads kernels when they are first used, which takes up to a second.
    for kind in _WARM_UPS:
        probe = min((each for each in wanted if each.kind is kind), key=attrgetter("tokens"), default=None)
        if probe is not None:
            on_probe("warm-up", 0.0)
            target.run(probe.streams)


def _suffice(rows: Sequence[ProfileRow], limits: TargetLimits, ran: Sequence[SweepProbe]) -> bool:
    kinds = {_sizes_of_row(row)[0] for row in rows} | {probe.kind.value for probe in ran}
    distinct = median_measurements(measurements(consistent_rows(rows), limits))
    return limits.disaggregated or (kinds.issuperset(KINDS) and len(distinct) >= FEWEST)


def _expected_s(probe: SweepProbe, rows: Sequence[ProfileRow]) -> float:
    # A high estimate, from the slowest iterations measured so far.
    long = [row for row in rows if row.prompt_size * row.batch_size >= _LONG]
    prompt_ms = max((row.prompt_time / (row.prompt_size * row.batch_size) for row in long), default=0.0)
    token_ms = max((row.token_time for row in rows), default=0.0)
    prompts = sum(stream.prompt_tokens for stream in probe.streams)
    outputs = max(stream.output_tokens for stream in probe.running)
    return probe.idle_s + (prompts * prompt_ms + outputs * token_ms) / 1e3


def _left(wanted: Sequence[SweepProbe], rows: Sequence[ProfileRow]) -> Iterator[SweepProbe]:
    # Probes are repeated in inverse proportion to the square root of their cost, which gives the least variance within
    # the budget (Neyman allocation): the speed of a shared host changes within seconds.
    turns = [
        ((number + (place + 1) / len(wanted)) * math.sqrt(probe.cost), number, probe)
        for number in range(_PASSES)
        for place, probe in enumerate(wanted)
    ]
    # A row with the sizes of a probe counts as a run of the probe, also if an earlier sweep measured it.
    done = Counter(_sizes_of_row(row) for row in rows)
    for _, number, probe in sorted(turns, key=itemgetter(0)):
        if min(done[sizes] for sizes in _sizes_of_probe(probe)) <= number:
            yield probe


def _sizes_of_row(row: ProfileRow) -> tuple[object, ...]:
    kinds = (kind for kind, column in _TIMED.items() if getattr(row, column))
    kind = next(kinds, ProbeKind.PREFILL).value
    return kind, row.prompt_size, row.batch_size, row.running, row.idle_time


def _sizes_of_probe(probe: SweepProbe) -> list[tuple[object, ...]]:
    running = probe.running
    if probe.kind is ProbeKind.MIXED:
        return [("mixed", stream.prompt_tokens, 1, len(running), 0.0) for stream in probe.injected]
    kind = "prefill" if probe.kind is ProbeKind.PARALLEL else probe.kind.value
    return [(kind, mean_prompt(running), len(running), 0, probe.idle_s * 1e3)]


def measured_slowness(target: Target, profile: MeasuredProfile, passes: int = _SPEED_PASSES) -> tuple[float, float]:
    """Return the factors by which prefill and decode iterations take longer than in the profile of the instance.

    Each factor is the geometric mean over probes of different sizes; for each probe, the median of `passes` counts.
    The target must be idle. Raises TargetError if a probe fails.
    """
    # A ratio of sums would be the ratio of the longest prompt, and include the error of the profile at its length.
    ratios = defaultdict[SweepProbe, list[float]](list)
    for probe in passes * speed_probes(target.limits):
        found = measurements(rows_of(probe, target.run(probe.streams), target.limits, ("", "", 1)), target.limits)
        ratios[probe] += [each.seconds / each.predicted_s(profile.times, profile.request_s) for each in found]
    prompts, decodes = (
        geometric_mean(median(found) for probe, found in ratios.items() if probe.kind is kind and found)
        for kind in (ProbeKind.PREFILL, ProbeKind.DECODE)
    )
    return prompts, decodes
