"""How far a long reading of a trace has come: on stderr, only on a terminal, only when it takes long."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from twofold.request import Request

PATIENCE_S = 1.0
_STEP = 1024  # requests between two looks at the clock


def watched(requests: Iterable[Request]) -> Iterator[Request]:
    """The same requests; a count of them appears once they have taken longer than a second."""
    if not sys.stderr.isatty():
        yield from requests
        return
    start, bar = time.monotonic(), None
    with ExitStack() as stack:
        for count, request in enumerate(requests):
            if count % _STEP == 0 and time.monotonic() - start > PATIENCE_S:
                bar = bar or stack.enter_context(_bar())
                bar.update(bar.task_ids[0], completed=count)
            yield request


def _bar() -> Progress:
    columns = SpinnerColumn(), TextColumn("{task.completed:,.0f} requests"), TimeElapsedColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task("", total=None)
    return bar
