"""State of simulated requests, and constant-memory statistics of a simulation."""

from collections.abc import Sequence
from itertools import compress
from typing import Final

from mypy_extensions import i64, mypyc_attr

from twofold.cluster.timing import PS, RunTiming, nearest, product
from twofold.handoff import HandoffMode, Lease
from twofold.instance import Role
from twofold.performance.base import PerformanceModel
from twofold.request import FinishReason, Request
from twofold.scheduling.instance.sequence import ScheduledSequence
from twofold.simulation.instance import SimulatedInstance
from twofold.simulation.series import Series
from twofold.slo import Slo
from twofold.timeline import Moment, Timeline

NEVER: Final = -1  # a missing moment; faster than an optional integer

# Upper limit of values (106 days in picoseconds), and the initial `low`.
LIMIT: Final = (1 << 63) - 1
_ROWS: Final = 54  # values below 1,024, then one row per bit length up to 63
_ROW: Final = 1024
_PLACES: Final = range(_ROW)
_PREFILL: Final = Role.PREFILL
_DECODE: Final = Role.DECODE
_MIXED: Final = Role.MIXED


def width_of(lowest: int) -> int:
    """Return the number of integers in the histogram bucket that starts at `lowest`."""
    return 1 << max(0, lowest.bit_length() - 11)


class Tally:
    """Histogram of integers ≥ 0 with HdrHistogram's buckets, 2⁻¹⁰ of a value or less. Total and extremes are exact."""

    __slots__ = ("_rows", "high", "low", "total")

    def __init__(self) -> None:
        # One row per bit length of values; rows without values are empty.
        self._rows: list[list[int]] = [[]] * _ROWS
        self.total = 0
        self.low = LIMIT
        self.high = -1

    @property
    def counts(self) -> dict[int, int]:
        """Number of values in each bucket. Keys are the lower bounds of the buckets, in ascending order."""
        return {
            (_ROW + place << row - 1) if row else place: counts[place]
            for row, counts in enumerate(self._rows)
            for place in compress(_PLACES, counts)
        }

    def add(self, value: int, weight: int = 1) -> None:
        """Add a value `weight` times (`weight` ≥ 1). Raise ValueError unless 0 ≤ value < 2⁶³ − 1."""
        if value < self.low or value > self.high:
            self._extend(value, value)
        self.total += value if weight == 1 else product(value, weight)
        place: i64 = value
        row: i64 = value.bit_length() - 10
        if row > 0:
            place = (place >> (row - 1)) - _ROW
        else:
            row = 0
        counts = self._rows[row]
        if not counts:
            counts = self._rows[row] = [0] * _ROW
        before: int = counts[place]
        counts[place] = before + weight

    def add_ramp(self, first: int, step: int, count: int, weight: int = 1) -> None:
        """Add the values `first`, `first + step`, …, each `weight` times. Raises ValueError for invalid numbers."""
        if step < 0:
            raise ValueError(f"the step of a ramp must be at least 0, not {step}")
        if count < 1 or weight < 1:
            return
        if step == 0:
            self.add(first, count * weight)
            return
        last = first + product(step, count - 1)
        self._extend(first, last)
        total = self.total + weight * (product(first, count) + product(step, count * (count - 1) // 2))
        value, left = first, count
        while left:
            width = width_of(value)
            rest = width - value % width  # of the bucket, from this value
            inside = left if value + rest > last else (rest - 1) // step + 1
            self.add(value, inside * weight)
            value += inside * step
            left -= inside
        self.total = total  # corrects values added as the first of their bucket

    def _extend(self, first: int, last: int) -> None:
        if first < 0 or last >= LIMIT:
            raise ValueError(f"a histogram counts integers from 0 to 2**63 - 2, not {first} to {last}")
        self.low = min(self.low, first)
        self.high = max(self.high, last)


@mypyc_attr(free_list_len=1)
class SimulatedRequest:
    """State of a simulated request. Times are in picoseconds; −1 means that a time is not known yet."""

    __slots__ = (
        *("request", "id", "prompt_tokens", "output_tokens", "number", "arrived"),
        *("prefill", "decode", "splits", "mode", "lease", "preemptions", "ended", "cached_tokens"),
        *("prefill_started", "first_layer", "first_token", "layers_sent", "last_token"),
        *("handoff_started", "handoff_ended", "decode_started"),
    )

    def __init__(
        self,
        request: Request,
        number: int,
        arrived: int,
        prefill: SimulatedInstance,
        decode: SimulatedInstance,
        mode: HandoffMode | None,
    ) -> None:
        self.request = request
        # Copies of the fields of the request for faster access.
        self.id = request.id
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.number = number
        self.arrived = arrived
        self.prefill = prefill
        self.decode = decode
        self.splits = prefill is not decode
        self.cached_tokens = 0  # of the prompt, in the cache of the decode instance
        self.mode = mode
        self.prefill_started = NEVER
        self.first_layer = NEVER  # end of the first layer of the prefill
        self.first_token = NEVER
        self.handoff_started = NEVER
        self.handoff_ended = NEVER
        self.decode_started = NEVER
        self.last_token = NEVER
        # End of the layer-wise transfer, if it precedes the end of the prefill.
        self.layers_sent = NEVER
        self.preemptions = 0
        self.lease: Lease | None = None
        self.ended = False

    def timeline(self, reason: FinishReason, output_tokens: int) -> Timeline:
        """Return the timeline of this request, with times in seconds."""
        moments = (
            (Moment.ARRIVED, self.arrived),
            (Moment.ROUTED, self.arrived),
            (Moment.PREFILL_STARTED, self.prefill_started),
            (Moment.HANDOFF_STARTED, self.handoff_started),
            (Moment.FIRST_TOKEN, self.first_token),
            (Moment.HANDOFF_ENDED, self.handoff_ended),
            (Moment.DECODE_STARTED, self.decode_started),
            (Moment.LAST_TOKEN, self.last_token),
        )
        return Timeline(
            self.request,
            {moment: at / PS for moment, at in moments if at != NEVER},
            output_tokens=output_tokens,
            finish_reason=reason,
            prefill_instance=self.prefill.name,
            decode_instance=self.decode.name,
            preemptions=self.preemptions,
        )


MICRO = 10**6  # slowdowns are tallied in millionths


class SlowdownTallies:
    """Slowdowns: latency divided by latency of the same request alone on a reference machine (Splitwise, section 5)."""

    def __init__(self, reference: PerformanceModel) -> None:
        self.ttft, self.tpot, self.e2e = Tally(), Tally(), Tally()
        self._reference = reference
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def add(self, life: SimulatedRequest, ttft: int, tpot: float | None, e2e: int) -> None:
        sizes = life.prompt_tokens, life.output_tokens
        alone = self._known.get(sizes)
        if alone is None:
            if len(self._known) > 1 << 16:
                self._known.clear()
            alone = self._known[sizes] = self._reference.uncontended(*sizes)
        first_s, each_s = alone
        self.ttft.add(nearest(ttft * (MICRO / PS) / first_s))
        if tpot is not None:
            self.tpot.add(nearest(tpot * (MICRO / PS) / each_s))
        self.e2e.add(nearest(e2e * (MICRO / PS) / (first_s + each_s * (life.output_tokens - 1))))


# Picosecond of an arrival; requests completed, output tokens and requests within the SLO until then.
Counts = tuple[int, int, int, int]
_MOST_COUNTS: Final = 256


class RunStatistics:
    """Counts and latency tallies of a simulation run.

    TPOT is the time from the first to the last token, divided by the number of output tokens minus 1. With
    `over_all_tokens`, the divisor is the number of output tokens, as in SplitwiseSim.
    """

    def __init__(self, slo: Slo | None, reference: PerformanceModel | None, *, over_all_tokens: bool) -> None:
        # In picoseconds.
        self.ttft, self.tpot, self.itl, self.e2e = Tally(), Tally(), Tally(), Tally()
        self.queue, self.transfer, self.visible_transfer = Tally(), Tally(), Tally()
        self.slo_scale = Tally()  # in millionths
        self.slowdowns = SlowdownTallies(reference) if reference is not None else None
        self.arrived = self.completed = self.rejected = self.failed = 0
        self.prompt_tokens = self.output_tokens = 0
        self.longest_request = 0  # tokens, of those completed
        self.longest_prompt = 0  # tokens, of those completed
        self.slo_met = 0
        self.handoffs = 0
        self.first_arrival: int | None = None
        self.last_arrival = self.last_end = 0
        self._counts: list[Counts] = []  # at every `_every`-th arrival
        self._every = 1
        self.slo = slo
        bounds = (None, None, None) if slo is None else (slo.ttft_s, slo.tpot_s, slo.e2e_s)
        self._bounds = [float("inf") if bound is None else bound * PS for bound in bounds]
        self._all_tokens = over_all_tokens

    def arrive(self, now: int) -> None:
        """Record the arrival of a request at picosecond `now`."""
        self.arrived += 1
        self.last_arrival = now
        if self.first_arrival is None:
            self.first_arrival = now
        if self.arrived % self._every == 0:
            self._counts.append((now, self.completed, self.output_tokens, self.slo_met))
            if len(self._counts) == _MOST_COUNTS:
                del self._counts[::2]
                self._every *= 2

    def steady(self) -> Counts:
        """Return the picoseconds of the second half of the arrivals, when the cluster is full, and the counts then."""
        counts = self._counts
        if not counts:
            return 0, 0, 0, 0
        middle, last = ((self.first_arrival or 0) + self.last_arrival) // 2, counts[-1]
        first = next(each for each in counts if each[0] >= middle or each is last)
        return last[0] - first[0], last[1] - first[1], last[2] - first[2], last[3] - first[3]

    def complete(self, life: SimulatedRequest, now: int) -> None:
        """Record a request that was completed at picosecond `now`."""
        first = life.first_token
        arrived, output = life.arrived, life.output_tokens
        ttft, e2e = first - arrived, now - arrived
        self.completed += 1
        self.last_end = now
        self.prompt_tokens += life.prompt_tokens
        self.output_tokens += output
        self.longest_request = max(self.longest_request, life.prompt_tokens + output)
        self.longest_prompt = max(self.longest_prompt, life.prompt_tokens)
        self.ttft.add(ttft)
        self.e2e.add(e2e)
        self.queue.add(life.prefill_started - arrived)
        tpot = None
        if now > first:
            tpot = (now - first) / (output if self._all_tokens else output - 1)
            self.tpot.add(nearest(tpot))
        if life.handoff_ended != NEVER:
            self.transfer.add(life.handoff_ended - life.handoff_started)
            self.visible_transfer.add(max(life.handoff_ended - first, 0))
        if self.slowdowns is not None:
            self.slowdowns.add(life, ttft, tpot, e2e)
        if self.slo is not None:
            max_ttft, max_tpot, max_e2e = self._bounds
            self.slo_met += ttft <= max_ttft and e2e <= max_e2e and (tpot is None or tpot <= max_tpot)
            needed = max(ttft / max_ttft, e2e / max_e2e, 0.0 if tpot is None else tpot / max_tpot)
            self.slo_scale.add(nearest(needed * MICRO))

    def gaps(self, pace: RunTiming, count: int, decodes: int, start: int, joined: list[ScheduledSequence]) -> None:
        """Record the inter-token latencies of `count` iterations that each decode `decodes` sequences.

        The sequences in `joined` have just joined the batch, each with its own time of the previous token.
        The remaining sequences got the previous token at time `start`, in picoseconds.
        """
        first, itl = pace.first_ps, self.itl
        if not joined:
            itl.add_ramp(first, pace.step_ps, count, decodes)
            return
        end = start + first
        for sequence in joined:
            itl.add(end - sequence.last_token_at)
        if decodes > len(joined):
            itl.add(first, decodes - len(joined))
        if count > 1:
            itl.add_ramp(first + pace.step_ps, pace.step_ps, count - 1, decodes)


class _PoolNow:
    def __init__(self) -> None:
        self.queue = self.batch = self.members = 0
        self.series = {"queue": Series(), "batch": Series(), "pool": Series()}
        self._set = [series.set for series in self.series.values()]

    def sample(self, at: int) -> None:
        queue, batch, members = self._set
        queue(at, float(self.queue))
        batch(at, float(self.batch))
        members(at, float(self.members))
        self.queue = self.batch = self.members = 0


class Sampler:
    """Samples queues, batches, pools and power at regular intervals of simulated time."""

    _MANY = 1024

    def __init__(self, instances: Sequence[SimulatedInstance]) -> None:
        self._instances = list(instances)
        self._interval = PS // 10
        self._samples = 0
        self._next = 0
        self._last = 0
        self._power = Series()
        self._pools = {role: _PoolNow() for role in Role}
        self._roles = sorted({instance.role for instance in instances} | {Role.MIXED})

    def before(self, at: int) -> int:
        """Take the sample that is due before picosecond `at`, if any, and return the time of the next one."""
        if at > self._next:
            self._last = self._next
            self._sample(self._next)
            self._samples += 1
            if self._samples % self._MANY == 0:
                self._interval *= 2  # few samples in long runs
            self._next = (at // self._interval + 1) * self._interval
        return self._next

    def _sample(self, at: int) -> None:
        pools, milliwatts = self._pools, 0
        prefill, decode, mixed = pools[_PREFILL], pools[_DECODE], pools[_MIXED]  # looked up once: roles hash as strings
        for instance in self._instances:
            load, iteration = instance.load, instance.batch
            if load is None:
                continue
            pool = prefill if load.role is _PREFILL else decode if load.role is _DECODE else mixed
            milliwatts += instance.milliwatts
            pool.members += load.place > 0  # paused instances have no role
            pool.queue += instance.scheduler.queued
            if iteration is not None:
                pool.batch += iteration.decode_sequences + iteration.prefill_sequences
        self._power.set(at, milliwatts / 1e3)
        for pool in pools.values():
            pool.sample(at)

    def finish(self, now: int) -> dict[str, Series]:
        """Extend all time series to picosecond `now`, and return them by name."""
        named = {"power_w": self._power}
        for role in self._roles:
            named |= {f"{kind}/{role.value}": series for kind, series in self._pools[role].series.items()}
        for series in named.values():
            series.finish(max(now, self._last))
        return named
