"""A progress bar for a load: on stderr, and only where that is a terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from twofold.bench.load import LoadCounts, OnChange

_COUNTS = "{task.fields[sent]}/{task.total} sent, {task.fields[done]} done, {task.fields[failed]} failed"


@contextmanager
def load_progress(total: int) -> Iterator[OnChange]:
    """A bar that follows the counts it is called with."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = BarColumn(), TextColumn(_COUNTS), TimeElapsedColumn()
    # The bar runs on cores that the measured service may be using: four pictures a second are enough.
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4, transient=True) as bar:
        task = bar.add_task("", total=total, sent=0, done=0, failed=0)

        def on_change(counts: LoadCounts) -> None:
            ended = counts.done + counts.failed
            bar.update(task, completed=ended, sent=counts.sent, done=counts.done, failed=counts.failed)

        yield on_change
