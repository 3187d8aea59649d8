"""How far a simulation has come and how fast it goes: on stderr, and only where that is a terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Ticked = Callable[[int, float], None]
_EVERY_S = 0.1
_DONE = "{task.completed:,.0f} requests, {task.fields[simulated]:,.1f} s simulated"
_SPEED = "{task.fields[speed]:,.0f}× real time, {task.fields[rate]:,.0f} requests per CPU second"


@contextmanager
def simulation_progress(total: int | None) -> Iterator[Ticked | None]:
    """A bar that follows the requests ended and the time simulated; None where nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = BarColumn(), TextColumn(_DONE), TextColumn(_SPEED), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=True) as bar:
        yield _follower(bar, total)


def _follower(bar: Progress, total: int | None) -> Ticked:
    task = bar.add_task("", total=total, simulated=0.0, speed=0.0, rate=0.0)
    start, cpu_start, shown = time.monotonic(), time.process_time(), 0.0

    def ticked(ended: int, simulated_s: float) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < _EVERY_S:
            return
        shown = now
        cpu_s = time.process_time() - cpu_start
        bar.update(
            task,
            completed=ended,
            simulated=simulated_s,
            speed=simulated_s / max(now - start, 1e-9),
            rate=ended / max(cpu_s, 1e-9),
        )

    return ticked
