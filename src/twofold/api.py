"""Python API: traces, and the commands `simulate` and `plan` as functions that return objects."""

import inspect
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cached_property, wraps
from itertools import count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_type_hints

from twofold.cli.plan.run import planned
from twofold.cli.plan.settings import PlanSettings
from twofold.cli.settings import Settings, flags_of, help_text, settings_of
from twofold.cli.simulate.run import simulated
from twofold.cli.simulate.settings import SimulateSettings
from twofold.cli.workload import WorkloadSettings
from twofold.errors import UserError, WorkloadError
from twofold.reporting.output import Tabular
from twofold.reporting.plan.outcome import PlanResult
from twofold.reporting.simulation.outcome import Simulation
from twofold.request import Request
from twofold.slo import Slo
from twofold.workload.distributions import load_lengths
from twofold.workload.source import LENGTHS
from twofold.workload.summary import TraceSummary, summarise
from twofold.workload.trace import find_format, write_trace

if TYPE_CHECKING:  # slow to import
    import pyarrow as pa

__all__ = ["PlanResult", "Simulation", "Slo", "Trace", "UserError", "plan", "simulate"]

_OF_COMMANDS: Final = ("json", "html", "output")  # flags that results have methods for

S = TypeVar("S", bound=Settings)
T = TypeVar("T")


class Trace(Tabular):
    """Requests in order of arrival: a table with arrival times in seconds, and lengths in tokens."""

    def __init__(self, requests: Iterable[Request], name: str = "trace") -> None:
        """Create a trace from requests. Raises WorkloadError if there are none, or if they are not in order."""
        self.requests, self.name = tuple(requests), name
        if not self.requests:
            raise WorkloadError(name, "the trace has no requests")
        for before, after in pairwise(self.requests):
            if after.arrival_s < before.arrival_s:
                raise WorkloadError(name, f"request {after.id} arrives before the one above it; sort by arrival")

    @classmethod
    def load(cls, workload: str | Path, **flags: Any) -> "Trace":  # noqa: ANN401  (as `twofold simulate` parses them)
        """Read a trace file (Azure csv, Mooncake jsonl, SplitwiseSim csv, AIPerf), or generate a named workload.

        `flags` are the workload flags of `twofold simulate`: `rate` (requests/s), `duration` and `start` (seconds),
        `num_requests`, `arrival`, `burstiness`, `length_scale`, `max_model_len` (tokens) and `seed`. A named workload,
        such as azure-conv, has the rate of the service that it was recorded on, if it is known, and lasts 120 seconds.
        Raises UserError for a missing file, a bad line or an invalid flag.
        """
        if workload in LENGTHS:
            flags.setdefault("rate", load_lengths(str(workload)).requests_per_s)
        settings = settings_of(WorkloadSettings, {"workload": str(workload), **flags})
        return cls(settings.requests(), Path(workload).name.partition(".")[0])

    @classmethod
    def from_arrivals(
        cls, arrival_s: Iterable[float], prompt_tokens: Iterable[int], output_tokens: Iterable[int], name: str = "trace"
    ) -> "Trace":
        """Create a trace from columns of equal length, such as lists, numpy arrays or columns of a data frame.

        `arrival_s` are seconds from any start, in ascending order. Raises WorkloadError for a wrong value.
        """
        columns = zip(count(), map(float, arrival_s), map(int, prompt_tokens), map(int, output_tokens), strict=False)
        return cls((_request(name, *row) for row in columns), name)

    @property
    def summary(self) -> TraceSummary:
        """Number of requests, duration in seconds, rate, burstiness, and statistics of lengths in tokens."""
        return summarise(self.requests)

    def to_arrow(self) -> "pa.Table":
        """Return the requests as a `pyarrow.Table`: id, arrival_s, prompt_tokens and output_tokens."""
        import pyarrow as pa  # noqa: PLC0415  (slow to import)

        names = ("id", "arrival_s", "prompt_tokens", "output_tokens")
        return pa.table({name: [getattr(request, name) for request in self.requests] for name in names})

    def save(self, path: str | Path, format: str = "twofold") -> None:  # noqa: A002  (as `twofold trace convert`)
        """Write the trace to a file, compressed if its name ends in .gz. The format `twofold` loses nothing."""
        write_trace(self.requests, path, find_format(format))

    @cached_property
    def path(self) -> Path:
        """File with the trace in a temporary folder, which disappears with this object."""
        folder = tempfile.mkdtemp(prefix="twofold-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.save(found := Path(folder, f"{self.name}.jsonl"))
        return found

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __repr__(self) -> str:
        return f"<Trace {self.name}: {len(self):,} requests in {self.summary.duration_s:,.1f} s>"


def _request(name: str, number: int, arrival_s: float, prompt: int, output: int) -> Request:
    if not (0 <= arrival_s < float("inf") and prompt >= 1 and output >= 1):
        lengths = f"{prompt} + {output} tokens at {arrival_s:g} s"
        raise WorkloadError(name, f"request {number} has {lengths}: give at least one token each, from 0 s on")
    return Request(id=str(number), arrival_s=arrival_s, prompt_tokens=prompt, output_tokens=output)


def _keywords(run: Callable[[S], T]) -> Callable[..., T]:
    """Turn a function that takes the settings of a command into one that takes its flags as keyword arguments."""
    kind: type[S] = get_type_hints(run)["settings"]
    hints, flags = get_type_hints(kind), flags_of(kind)
    taken = [each for each in fields(kind) if each.name not in (*_OF_COMMANDS, "workload")]

    @wraps(run)
    def called(workload: str | Path | Trace, **given: Any) -> T:  # noqa: ANN401
        source = workload.path if isinstance(workload, Trace) else workload
        for name in given.keys() & _OF_COMMANDS:
            raise TypeError(f"unexpected keyword argument {name!r}: the result has methods for it")
        return run(settings_of(kind, {**given, "workload": str(source)}))

    first = inspect.Parameter("workload", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str | Path | Trace)
    others = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=each.default,
            annotation=hints[each.name] | str if flags[each.name].parse else hints[each.name],
        )
        for each in taken
    ]
    given = [f"    {each.name}: {help_text(kind, each.name)}" for each in taken]
    called.__signature__ = inspect.Signature([first, *others], return_annotation=get_type_hints(run)["return"])  # type: ignore[attr-defined]
    called.__doc__ = "\n".join([inspect.cleandoc(run.__doc__ or ""), "", "Keyword arguments:", *given])
    return called


@_keywords
def simulate(settings: SimulateSettings) -> Simulation:
    """Simulate a workload on a cluster, as `twofold simulate` does.

    `workload` is a `Trace`, a trace file, a named workload such as azure-conv, or lengths as in 512+64. Raises
    UserError, with the sentence of the command, for an invalid flag or file.
    """
    return simulated(settings)


@_keywords
def plan(settings: PlanSettings) -> PlanResult:
    """Find the best machines for a workload, as `twofold plan` does, with simulations in processes of this host.

    `workload` is as for `simulate`. Finished simulations are stored in `.twofold/plan.sqlite` of the working directory
    (`store`), so a repeated plan is quick. Raises UserError for an invalid flag or file, or if no design meets the SLO.
    """
    return planned(settings)
