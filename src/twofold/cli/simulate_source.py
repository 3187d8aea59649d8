"""Which requests a simulation serves: the workload that flags describe."""

import math
from collections.abc import Iterator

import msgspec

from twofold.cli.simulate import DEFAULT_DURATION_S
from twofold.errors import ConfigurationError
from twofold.request import Request
from twofold.workload.source import is_named, workload

MOST_SECONDS = 1e9
MOST_REQUESTS = 1e10
_LEAST_BURSTINESS = 1e-3
_MOST_LENGTH_SCALE = 1e6


def require_an_end(
    *, rate: float | None, duration_s: float | None, burstiness: float, length_scale: float
) -> None:
    """Raise ConfigurationError for a workload that nobody could wait for; what is no number at all others refuse."""
    for flag, value, most, unit in (
        ("--rate", rate, MOST_REQUESTS, "requests per second"),
        ("--duration", duration_s, MOST_SECONDS, "seconds"),
        ("--length-scale", length_scale, _MOST_LENGTH_SCALE, "times"),
    ):
        if value is not None and most < value < math.inf:
            raise ConfigurationError(f"{flag} {value:g} is too much: give at most {most:g} {unit}")
    if 0 < burstiness < _LEAST_BURSTINESS:
        raise ConfigurationError(
            f"--burstiness {burstiness:g} is too small: give at least {_LEAST_BURSTINESS:g}"
        )
    requests = (rate or 0.0) * (duration_s or 0.0)
    if MOST_REQUESTS < requests < math.inf:
        raise ConfigurationError(
            f"--rate and --duration ask for {requests:.2g} requests, more than {MOST_REQUESTS:.0e}: lower one of them"
        )


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests come: the flags of the workload, named as the arguments of `workload`."""

    workload: str
    rate: float | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    start_s: float = 0.0
    arrival: str | None = None
    burstiness: float = 1.0
    length_scale: float = 1.0
    max_model_len: int | None = None
    seed: int = 0

    def requests(self) -> Iterator[Request]:
        """The requests as a stream; one that ends without any raises ConfigurationError."""
        require_an_end(
            rate=self.rate,
            duration_s=self._duration_s(),
            burstiness=self.burstiness,
            length_scale=self.length_scale,
        )
        stream = workload(
            self.workload,
            rate=self.rate,
            num_requests=self.num_requests,
            duration_s=self._duration_s(),
            arrival=self.arrival,
            burstiness=self.burstiness,
            seed=self.seed,
            length_scale=self.length_scale,
            max_model_len=self.max_model_len,
            start_s=self.start_s,
        )
        return self._at_least_one(stream)

    def facts(self) -> dict[str, str | int | float | None]:
        """What the JSON says of it."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "seed"}
        return fields | {"duration_s": self._duration_s()}

    def title(self) -> str:
        return self.workload if self.rate is None else f"{self.workload} at {self.rate:g} requests/s"

    def _duration_s(self) -> float | None:
        """A named workload has no end of its own."""
        endless = is_named(self.workload) and self.num_requests is None and self.duration_s is None
        return DEFAULT_DURATION_S if endless else self.duration_s

    def _at_least_one(self, requests: Iterator[Request]) -> Iterator[Request]:
        empty = True
        for request in requests:
            empty = False
            yield request
        if empty:
            raise ConfigurationError(
                f"workload {self.workload} gives no request within the limits that were set"
            )
