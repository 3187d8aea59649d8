"""Flags that select a workload: a named workload or a trace, with its rate, arrivals and lengths."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from twofold.cli import options
from twofold.cli.settings import Settings, refuse
from twofold.errors import require
from twofold.request import Request

DEFAULT_DURATION_S: Final = 120.0


class ShapeSettings(Settings, panel="Workload"):
    """Flags for the arrivals and lengths of a workload's requests."""

    start: float = options.START.field(0.0)
    arrival: str | None = options.ARRIVAL.field(unset="poisson; that of the trace")
    burstiness: float = options.BURSTINESS.field(1.0)
    length_scale: float = options.LENGTH_SCALE.field(1.0)
    max_model_len: int | None = options.CLIP_LENGTH.field(unset="no limit")
    seed: int = options.SEED.field(0)

    def shape(self) -> dict[str, Any]:
        """Return the workload flags as keyword arguments of `twofold.workload.source.workload`."""
        values = {each.name: getattr(self, each.name) for each in fields(ShapeSettings)}
        return {"start_s": values.pop("start"), **values}


class ArrivalSettings(ShapeSettings):
    """Flags for the rate of a workload, or for a closed loop of clients."""

    rate: float | None = options.RATE.field()
    concurrency: int | None = options.CONCURRENCY.field(unset="open loop")
    think_time: float | None = options.THINK_TIME.field(unset="0")

    def check_closed_loop(self) -> None:
        """Raise ConfigurationError for flags that a closed loop needs or contradicts."""
        if self.concurrency is None:
            refuse(self, "think_time", "needs --concurrency")
        else:
            refuse(self, "rate arrival", "sets arrival times, which --concurrency ignores")


class WorkloadSettings(ArrivalSettings):
    """Flags for the requests of a simulation."""

    workload: str = options.WORKLOAD.field(...)
    rate: float | None = options.RATE.field(unset="that of the trace")
    num_requests: int | None = options.NUM_REQUESTS.field(unset="no limit")
    duration: float | None = options.DURATION.field(
        unset=f"the whole trace; {DEFAULT_DURATION_S:g} for a named workload without --num-requests"
    )

    def requests(self) -> Iterator[Request]:
        """Stream the workload's requests. Raises ConfigurationError if there are none, or if a flag is out of range."""
        from twofold.workload.source import is_named, workload  # noqa: PLC0415  (imports numpy)

        many = (self.rate or 0.0) * (self.duration_s or 0.0)
        most = f"more than {options.MAX_REQUESTS:.0e}: lower one of them"
        require(many <= options.MAX_REQUESTS, f"--rate and --duration make {many:.2g} requests, {most}")
        self.check_closed_loop()
        closed = self.concurrency is not None  # then the arrival times have no effect
        requests = workload(
            self.workload,
            rate=1.0 if closed and is_named(self.workload) else self.rate,
            num_requests=self.num_requests,
            duration_s=options.MAX_SECONDS if closed else self.duration_s,
            **self.shape(),
        )
        return nonempty(requests, f"workload {self.workload} has no request within the limits")

    @property
    def duration_s(self) -> float | None:
        """Maximum duration of the workload in seconds, or None for no limit."""
        from twofold.workload.source import is_named  # noqa: PLC0415  (imports numpy)

        # A named workload without a limit would never end.
        endless = is_named(self.workload) and self.num_requests is None and self.duration is None
        return DEFAULT_DURATION_S if endless else self.duration

    @property
    def title(self) -> str:
        name = Path(self.workload).name
        if self.concurrency is not None:
            return f"{name} at concurrency {self.concurrency}"
        return name if self.rate is None else f"{name} at {self.rate:g} requests/s"

    def facts(self) -> dict[str, str | int | float | None]:
        """Return the workload flags for the JSON report."""
        shape = self.shape()
        del shape["seed"]
        names = ("workload", "rate", "num_requests", "duration_s", "concurrency")
        return {**{name: getattr(self, name) for name in names}, "think_time_s": self.think_time, **shape}


def nonempty(requests: Iterable[Request], otherwise: str) -> Iterator[Request]:
    """Yield the requests. If there are none, raise ConfigurationError with `otherwise` as the message."""
    empty = True
    for request in requests:
        empty = False
        yield request
    require(not empty, otherwise)
