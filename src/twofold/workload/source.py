"""Function `workload`, which returns the requests of a generated workload or of a trace file."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from twofold.errors import ConfigurationError, WorkloadError, require
from twofold.hardware.suggestions import suggestion, unknown_name
from twofold.request import Request
from twofold.workload.distributions import (
    ARRIVALS,
    REPLAY,
    arrival_times,
    load_lengths,
    require_positive,
    uniform_lengths,
)
from twofold.workload.rescale import fit_lengths, mean_rate, retime, scale_rate, take, to_rate, window
from twofold.workload.rows import require_file
from twofold.workload.sessions import agent_turns, mean_turns
from twofold.workload.trace import open_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Part of a trace to replay, and its arrival rate.

    The part begins `start_s` seconds after the start of the trace. Either `rate_scale` multiplies its arrival rate, or
    `rate` sets its mean rate in requests per second. `duration_s` limits the replay in seconds.
    """

    start_s: float = 0.0
    duration_s: float | None = None
    num_requests: int | None = None
    rate: float | None = None
    rate_scale: float | None = None

    def __post_init__(self) -> None:
        """Raise ConfigurationError if a field is invalid."""
        require(self.rate is None or self.rate_scale is None, "give either a rate or a rate scale, not both")
        if self.rate is not None:
            require_positive("rate", self.rate)
        if self.rate_scale is not None:
            require_positive("rate scale", self.rate_scale)
        window((), self.start_s, self.duration_s)
        take((), self.num_requests)

    def requests(self, reopen: Callable[[], Iterator[Request]]) -> Iterator[Request]:
        """Return the selected requests of a trace, at scaled times. `reopen` returns a new iterator over all."""
        if self.rate is not None:
            scaled = to_rate(lambda: self._part(reopen), self.rate)
        else:
            scaled = scale_rate(self._part(reopen), self.rate_scale or 1.0)
        return window(scaled, 0.0, self.duration_s)

    def _part(self, reopen: Callable[[], Iterator[Request]]) -> Iterator[Request]:
        count = self.num_requests
        if self.rate is not None and self.duration_s is not None:
            # Tolerance for float error, so that 0.1 requests/s for 30 s give three requests.
            fitting = max(1, math.floor(self.rate * self.duration_s * (1 + 1e-12)))
            count = fitting if count is None else min(count, fitting)
        return take(window(reopen(), self.start_s), count)


AGENT = "agent"
# Each name is a quantile file in data/.
LENGTHS: tuple[str, ...] = ("azure-code", "azure-conv", "distserve-chat", "distserve-code", "distserve-summaries")
NAMED = (*LENGTHS, AGENT)


def is_named(spec: str) -> bool:
    """Return whether `spec` describes a generated workload: by a name, or by prompt and output length as in 512+64."""
    return spec in NAMED or uniform_lengths(spec) is not None


def workload(
    spec: str,
    *,
    rate: float | None = None,
    num_requests: int | None = None,
    duration_s: float | None = None,
    arrival: str | None = None,
    burstiness: float = 1.0,
    seed: int = 0,
    length_scale: float = 1.0,
    max_model_len: int | None = None,
    start_s: float = 0.0,
) -> Iterator[Request]:
    """Return the requests of a generated workload or of a trace file, in order of arrival.

    `spec` is the name of a built-in workload such as azure-conv, fixed lengths such as 512+64, or the path of a trace.
    Prompt and output lengths are multiplied by `length_scale`, and requests are shortened to `max_model_len` tokens.

    A generated workload needs `rate` (requests per second) and either `num_requests` or `duration_s`. The default
    `arrival` process of a generated workload is poisson, or gamma if `burstiness` is not 1.

    A trace file is replayed from `start_s` seconds on; `num_requests` and `duration_s` limit the replay. If
    `rate` is given, the recorded arrival times are scaled to this mean rate. If `arrival` is poisson, gamma or
    constant, new arrival times are generated, at `rate` or at the mean rate of the trace.

    Invalid arguments raise ConfigurationError. A missing file or a bad line raises WorkloadError.
    """
    if is_named(spec):
        require(not start_s, f"{spec} is generated and begins at 0: only trace files take a start")
        requests = generate(
            spec,
            rate=rate,
            num_requests=num_requests,
            duration_s=duration_s,
            arrival=arrival,
            burstiness=burstiness,
            seed=seed,
        )
    else:
        _require_known(spec)
        part = Replay(start_s=start_s, duration_s=duration_s, num_requests=num_requests, rate=rate)
        requests = _from_trace(lambda: open_trace(spec), part, arrival or REPLAY, burstiness, seed)
    return fit_lengths(requests, length_scale, max_model_len)


def generate(
    name: str,
    *,
    rate: float | None,
    num_requests: int | None = None,
    duration_s: float | None = None,
    arrival: str | None = None,
    burstiness: float = 1.0,
    seed: int = 0,
) -> Iterator[Request]:
    """Return the requests of a generated workload. Raises ConfigurationError for invalid arguments."""
    if not is_named(name):
        raise unknown_name("workload", name, NAMED)
    lengths = None if name == AGENT else load_lengths(name)
    if rate is None:
        own = f"its trace has {lengths.requests_per_s:.2f}" if lengths is not None and lengths.requests else "as in 1.5"
        raise ConfigurationError(f"{name} needs a rate in requests per second ({own})")
    ends = num_requests is not None or duration_s is not None
    require(ends, f"{name} is endless: give a number of requests or a duration")
    require(arrival != REPLAY, f"{name} has no arrival times: use {', '.join(ARRIVALS)}")
    times = partial(
        arrival_times, arrival or ("poisson" if burstiness == 1 else "gamma"), seed=seed, burstiness=burstiness
    )
    if lengths is None:  # `rate` counts all turns
        turns = agent_turns(times(rate=rate / mean_turns()), seed)
        return window(take(turns, num_requests), 0.0, duration_s)
    endless = (
        Request(id=str(index), arrival_s=time, prompt_tokens=prompt, output_tokens=output)
        for index, (time, (prompt, output)) in enumerate(zip(times(rate=rate), lengths.sample(seed), strict=False))
    )
    return window(take(endless, num_requests), 0.0, duration_s)


def _from_trace(
    reopen: Callable[[], Iterator[Request]], part: Replay, arrival: str, burstiness: float, seed: int
) -> Iterator[Request]:
    if arrival == REPLAY:
        require(burstiness == 1, f"a burstiness of {burstiness:g} needs gamma arrivals, not the trace's own")
        return part.requests(reopen)
    require(arrival in ARRIVALS, f"arrival process {arrival!r} is not one of {', '.join((REPLAY, *ARRIVALS))}")
    own = part.rate or mean_rate(window(reopen(), part.start_s))
    timed = retime(window(reopen(), part.start_s), arrival_times(arrival, own or 1.0, seed, burstiness))
    return window(take(timed, part.num_requests), 0.0, part.duration_s)


def _require_known(spec: str) -> None:
    try:
        require_file(Path(spec))
    except WorkloadError as error:
        if "/" in spec or Path(spec).suffix:
            raise
        raise ConfigurationError(
            f"workload {spec!r} is neither a trace file nor lengths as in 512+64 nor one of {', '.join(NAMED)}"
            f"{suggestion(spec, NAMED)}"
        ) from error
