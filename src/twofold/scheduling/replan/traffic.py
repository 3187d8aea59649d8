"""Detection of shifts in request rate, prompt length and output length.

The change-point tests use means over 16 consecutive requests, to limit the effect of bursts and long requests.
The test of the request rate uses the cube root of the mean time between arrivals, because the cube root is
nearly normally distributed (Wilson and Hilferty, 1931). The tests of lengths use logarithms of the lengths.

Estimates of output length include running requests (Kaplan and Meier, 1958), because finished requests alone
are biased towards short outputs.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import islice, pairwise
from math import cbrt, exp, log
from typing import Final

import msgspec

from twofold.scheduling.replan.change_point import WINDOWS, ChangePoint, MeanChange


def estimate_output_lengths(ended: Sequence[int], running: Sequence[int], count: int) -> tuple[int, ...]:
    """Estimate the distribution of output lengths from finished (`ended`) and unfinished (`running`) outputs. Return
    `count` evenly spaced quantiles, in tokens.
    """
    # `ended` must not be empty. Beyond the longest observed length L, outputs are assumed to end at the rate per token
    # observed between L/2 and L.
    waiting, left, at_risk = sorted(running), 1.0, len(ended) + len(running)
    steps: list[tuple[int, float]] = []  # each length, and the share of longer outputs
    for length, ends in sorted(Counter(ended).items()):
        left *= 1.0 - ends / (at_risk - bisect_left(waiting, length))
        steps.append((length, left))
        at_risk -= ends
    longest = max((*ended, *running))
    ends_per_token = _ending(ended, running, longest // 2) or _ending(ended, running, 0) or 1.0 / (longest + 1)
    found: list[int] = []
    for share in (1.0 - (number + 0.5) / count for number in range(count)):  # of longer outputs
        place = bisect_left(steps, -share, key=lambda step: -step[1])
        known = place < len(steps)
        found.append(steps[place][0] if known else longest + round(log(left / share) / ends_per_token))
    return tuple(found)


def _ending(ended: Sequence[int], running: Sequence[int], beyond: int) -> float:
    """Estimate the probability that an output ends at its next token, once it has more than `beyond` tokens."""
    made = sum(max(0, tokens - beyond) for tokens in (*ended, *running))
    return sum(tokens > beyond for tokens in ended) / made if made else 0.0


BATCH: Final = 16  # requests per batch
TOLERANCE: Final = 1.25  # the smallest factor of a shift
FALSE_ALARM_S: Final = 360_000.0  # without a shift, the expected time between alarms
_KEPT: Final = (WINDOWS[-1] + 1) * BATCH  # requests in memory: enough for the longest window
_MOST_OPEN: Final = 8192  # unfinished requests; beyond this number, the oldest is skipped
_SETTLED: Final = 128  # requests to arrive after a shift
_SETTLED_OUTPUTS: Final = 32  # requests to end after a shift
_OUTPUTS: Final = 512  # sampled output lengths
_HIGHEST_LEVEL: Final = 1e-3
_LEAST_ROOT: Final = 1e-3  # cube root of the gap between simultaneous requests, in seconds
_VARIATION: Final = (0.1, 10.0)  # bounds of the squared CV of gaps, against outliers in small samples


class Quantity(StrEnum):
    """Monitored quantities of the traffic: request rate, prompt length and output length."""

    RATE = "rate"
    PROMPT = "prompt"
    OUTPUT = "output"


class TrafficShift(msgspec.Struct, frozen=True, kw_only=True):
    """A shift of the request rate, of prompt lengths or of output lengths."""

    quantity: Quantity
    before: float  # rate in requests/s, or geometric mean length in tokens
    after: float
    requests: int  # since the shift began
    sigmas: float  # significance, see `MeanChange`

    @property
    def ratio(self) -> float:
        return self.after / self.before


class TrafficSample(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic to plan for: rate, burstiness and lengths of requests."""

    rate: float  # requests/s
    burstiness: float  # inverse of the squared coefficient of variation of the gaps between arrivals
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]


class _Stream:
    """Detects changes of one traffic quantity, such as prompt length, from its means over groups of requests."""

    def __init__(self, tested: Callable[[float], float], natural: Callable[[float], float]) -> None:
        self.changes = ChangePoint()
        self.open = 0  # requests in the incomplete batch
        self._sum = 0.0
        # `tested` transforms each mean for the tests, `natural` converts it back to the unit of the quantity.
        self._tested, self.natural = tested, natural

    def add(self, number: float) -> bool:
        """Add a measured value, such as a prompt length; return True if it completes a group of `BATCH` values."""
        self._sum += number
        self.open += 1
        if self.open < BATCH:
            return False
        self.changes.add(self._tested(self._sum / BATCH))
        self._sum, self.open = 0.0, 0
        return True


class TrafficMonitor:
    """Detector of significant shifts in request rate, prompt length or output length by a factor of `TOLERANCE`."""

    def __init__(self) -> None:
        self._streams = {
            Quantity.RATE: _Stream(cbrt, _rate),
            Quantity.PROMPT: _Stream(float, exp),
            Quantity.OUTPUT: _Stream(float, exp),
        }
        self._alarmed: set[Quantity] = set()
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=_KEPT)  # time, prompt tokens
        # Number of the request, and output tokens, in order of arrival. In order of completion, short outputs would
        # come first after a rise of the rate, and look like a shift to shorter outputs.
        self._outputs: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        self._count = 0
        self._ended: dict[int, int | None] = {}  # output lengths of ended requests that arrived after a running one
        self._next = 0  # the oldest request that has not ended

    def arrived(self, prompt_tokens: int, now: float) -> int:
        """Record the arrival of a request; return its number, to be passed to `ended`."""
        if self._arrivals:
            self._add(Quantity.RATE, now - self._arrivals[-1][0])
        self._arrivals.append((now, prompt_tokens))
        self._add(Quantity.PROMPT, log(max(1, prompt_tokens)))
        number = self._count
        self._count += 1
        if self._count - self._next > _MOST_OPEN:
            self._ended.setdefault(self._next, None)
            self._release()
        return number

    def ended(self, number: int, output_tokens: int | None) -> None:
        """Record the end of request `number`. `output_tokens` is None for an incomplete output."""
        if number >= self._next:
            self._ended[number] = output_tokens
            self._release()

    def _release(self) -> None:
        while self._next in self._ended:
            tokens = self._ended.pop(self._next)
            if tokens is not None:
                self._outputs.append((self._next, tokens))
                self._add(Quantity.OUTPUT, log(max(1, tokens)))
            self._next += 1

    def _add(self, quantity: Quantity, number: float) -> None:
        stream = self._streams[quantity]
        if stream.add(number) and self._shift(quantity, stream.changes.strongest()) is not None:
            self._alarmed.add(quantity)

    @property
    def alarmed(self) -> bool:
        """Whether a traffic shift has been detected since the last call of `accept`."""
        return len(self._alarmed) > 0

    def shifts(self) -> list[TrafficShift]:
        """Return the detected traffic shifts that a slower, more precise test confirms."""
        found: list[TrafficShift] = []
        for quantity in Quantity:
            if quantity in self._alarmed:
                shift = self._shift(quantity, self._streams[quantity].changes.located())
                if shift is None:
                    self._alarmed.discard(quantity)
                else:
                    found.append(shift)
        return found

    def settled(self, shifts: Sequence[TrafficShift]) -> bool:
        """Return whether the traffic since the latest shift has enough requests for an estimate."""
        since = self._since(shifts)
        return self._count - since >= _SETTLED and len(self._ended_since(since)) >= _SETTLED_OUTPUTS

    def traffic(self, shifts: Sequence[TrafficShift], made: Callable[[int], int]) -> TrafficSample | None:
        """Return a sample of the traffic since the last of `shifts`; None if too few requests have arrived or ended."""
        since = self._since(shifts)
        arrivals = list(islice(self._arrivals, max(0, len(self._arrivals) - (self._count - since)), None))
        ended = self._ended_since(since)
        # `made(number)` returns the output tokens so far of a running request.
        running = [made(number) for number in range(max(since, self._next), self._count) if number not in self._ended]
        if len(ended) < _SETTLED_OUTPUTS:  # use all recorded lengths
            ended, running = [tokens for _, tokens in self._outputs], []
        passed_s = arrivals[-1][0] - arrivals[0][0] if arrivals else 0.0
        if passed_s <= 0.0 or not ended:
            return None
        gaps = [later - earlier for (earlier, _), (later, _) in pairwise(arrivals)]
        mean = sum(gaps) / len(gaps)
        squared_variation = sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2
        return TrafficSample(
            rate=len(gaps) / passed_s,
            burstiness=1.0 / min(max(squared_variation, _VARIATION[0]), _VARIATION[1]),
            prompt_tokens=tuple(tokens for _, tokens in arrivals),
            output_tokens=estimate_output_lengths(ended, running, _OUTPUTS),
        )

    def accept(self, shifts: Sequence[TrafficShift]) -> None:
        """Forget the traffic before the latest shift, and detect further shifts relative to the new traffic."""
        since = self._since(shifts)
        came = self._count - since
        for quantity, stream in self._streams.items():
            numbers = sum(number >= since for number, _ in self._outputs) if quantity is Quantity.OUTPUT else came
            stream.changes.restart(numbers // BATCH)
        self._alarmed.clear()

    def _shift(self, quantity: Quantity, change: MeanChange | None) -> TrafficShift | None:
        """Return the traffic shift at a detected change point, or None if the shift is small or not significant."""
        if change is None or len(self._arrivals) < 2:
            return None
        passed_s = self._arrivals[-1][0] - self._arrivals[0][0]
        batches_s = BATCH * passed_s / (len(self._arrivals) - 1)
        comparisons = len(self._streams) * len(WINDOWS)  # for a Bonferroni correction
        if change.chance > min(_HIGHEST_LEVEL, batches_s / (FALSE_ALARM_S * comparisons)):
            return None
        stream = self._streams[quantity]
        shift = TrafficShift(
            quantity=quantity,
            before=stream.natural(change.before),
            after=stream.natural(change.after),
            requests=change.numbers * BATCH + stream.open,
            sigmas=change.sigmas,
        )
        return shift if max(shift.ratio, 1.0 / shift.ratio) >= TOLERANCE else None

    def _since(self, shifts: Sequence[TrafficShift]) -> int:
        """Return the arrival index of the first request after the latest traffic shift."""
        since = self._count - len(self._arrivals)  # the oldest in memory
        for shift in shifts:
            if shift.quantity is Quantity.OUTPUT:
                back = min(shift.requests, len(self._outputs))
                since = max(since, self._outputs[-back][0])
            else:
                since = max(since, self._count - shift.requests)
        return since

    def _ended_since(self, since: int) -> list[int]:
        """Return output lengths, in tokens, of completed requests with an arrival index of at least `since`."""
        later = (tokens for number, tokens in self._ended.items() if number >= since and tokens is not None)
        return [*(tokens for number, tokens in self._outputs if number >= since), *later]


def _rate(root: float) -> float:
    return 1.0 / max(root, _LEAST_ROOT) ** 3
