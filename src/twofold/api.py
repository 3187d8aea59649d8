"""Python API: traces, and the commands `simulate` and `plan` as functions that return objects."""

import asyncio
import inspect
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from twofold.cli.plan.run import planned
from twofold.cli.plan.settings import PlanSettings
from twofold.cli.settings import Settings, help_text, settings_of
from twofold.cli.simulate.run import simulated
from twofold.cli.simulate.settings import SimulateSettings
from twofold.cli.workload import WorkloadSettings
from twofold.errors import UserError
from twofold.reporting.outcome import PlanResult, Simulation, Tabular
from twofold.request import Request
from twofold.slo import Slo
from twofold.workload.distributions import load_lengths
from twofold.workload.source import LENGTHS
from twofold.workload.summary import TraceSummary, summarise
from twofold.workload.trace import find_format, open_trace, write_trace

if TYPE_CHECKING:  # slow to import
    import pyarrow as pa

__all__ = ["PlanResult", "Simulation", "Slo", "Trace", "UserError", "plan", "simulate"]

S = TypeVar("S", bound=Settings)
T = TypeVar("T")


class Trace(Tabular):
    """Requests in order of arrival, with times in seconds and lengths in tokens, in a file that goes with the trace."""

    def __init__(self, requests: Iterable[Request], name: str = "trace") -> None:
        """Create a trace from requests. Raises WorkloadError for none, a wrong order, or a wrong length."""
        folder = tempfile.mkdtemp(prefix="twofold-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = Path(folder, f"{name}.jsonl")
        write_trace(requests, self.path, find_format("twofold"))
        self.requests = tuple(open_trace(self.path))

    @classmethod
    def load(cls, workload: str | Path, **flags: Any) -> "Trace":  # noqa: ANN401  (as `twofold simulate` has them)
        """Read a trace file (Azure csv, Mooncake jsonl, SplitwiseSim csv, AIPerf), or generate a named workload.

        `flags` are the workload flags of `twofold simulate`: `rate` (requests/s), `duration` and `start` (seconds),
        `num_requests`, `arrival`, `burstiness`, `length_scale`, `max_model_len` (tokens) and `seed`. A named workload,
        such as azure-conv, has the rate of the service that it was recorded on, if that is known, and lasts 120
        seconds. Raises UserError for a missing file, a bad line or an invalid flag.
        """
        if workload in LENGTHS:
            flags.setdefault("rate", load_lengths(str(workload)).requests_per_s)
        settings = settings_of(WorkloadSettings, {"workload": str(workload), **flags})
        return cls(settings.requests(), Path(workload).name.partition(".")[0])

    @classmethod
    def from_arrivals(
        cls, arrival_s: Iterable[float], prompt_tokens: Iterable[int], output_tokens: Iterable[int]
    ) -> "Trace":
        """Create a trace from columns of equal length: lists, numpy arrays or columns of a data frame.

        `arrival_s` are seconds from 0 on, in ascending order. Raises WorkloadError for a wrong value.
        """
        rows = enumerate(zip(arrival_s, prompt_tokens, output_tokens, strict=True))
        return cls(
            Request(id=str(number), arrival_s=float(at), prompt_tokens=int(prompt), output_tokens=int(output))
            for number, (at, prompt, output) in rows
        )

    @property
    def summary(self) -> TraceSummary:
        """Number of requests, duration in seconds, rate, burstiness, and statistics of lengths in tokens."""
        return summarise(self.requests)

    def to_arrow(self) -> "pa.Table":
        """Return the requests as a `pyarrow.Table`: id, arrival_s, prompt_tokens and output_tokens."""
        import pyarrow as pa  # noqa: PLC0415  (slow to import)

        names = ("id", "arrival_s", "prompt_tokens", "output_tokens")
        return pa.table({name: [getattr(request, name) for request in self.requests] for name in names})

    def __len__(self) -> int:
        return len(self.requests)

    def __repr__(self) -> str:
        return f"<Trace {self.path.stem}: {len(self):,} requests in {self.summary.duration_s:,.1f} s>"


def _with_keywords(run: Callable[[S], T]) -> Callable[..., T]:
    """Turn a function of a command's settings into one that takes the flags of the command as keyword arguments."""
    kind: type[S] = get_type_hints(run)["settings"]
    hints, flags = get_type_hints(kind), [each for each in fields(kind) if each.name not in {"workload", "json"}]

    @wraps(run)
    def called(workload: str | Path | Trace, **given: Any) -> T:  # noqa: ANN401  (as the command has them)
        source = workload.path if isinstance(workload, Trace) else workload
        return run(settings_of(kind, {**given, "workload": str(source)}))

    positional, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    first = inspect.Parameter("workload", positional, annotation=str | Path | Trace)
    others = [inspect.Parameter(it.name, keyword, default=it.default, annotation=hints[it.name]) for it in flags]
    called.__signature__ = inspect.Signature([first, *others])  # type: ignore[attr-defined]
    texts = [f"    {each.name}: {help_text(kind, each.name)}" for each in flags]
    called.__doc__ = "\n".join([inspect.cleandoc(run.__doc__ or ""), "", "Keyword arguments:", *texts])
    return called


@_with_keywords
def simulate(settings: SimulateSettings) -> Simulation:
    """Simulate a workload on a cluster, as `twofold simulate` does.

    `workload` is a `Trace`, a trace file, a named workload such as azure-conv, or lengths as in 512+64. Raises
    UserError, with the sentence of the command, for an invalid flag or file.
    """
    return simulated(settings)


@_with_keywords
def plan(settings: PlanSettings) -> PlanResult:
    """Find the best machines for a workload, as `twofold plan` does, with simulations in processes of this host.

    `workload` is as for `simulate`. A repeated plan takes its simulations from `store`. Raises UserError for an invalid
    flag or file, or if no design meets the SLO.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return planned(settings)
    pool = ThreadPoolExecutor(1)  # beside the event loop of a notebook, which allows no second one in its thread
    try:
        return pool.submit(planned, settings).result()
    finally:
        pool.shutdown(wait=False)
