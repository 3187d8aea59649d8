"""Predicted prefill queue of an instance, for overload control."""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import Final

import msgspec

from twofold.performance.base import PerformanceModel

_RATE_PROMPTS: Final = 32  # averages out prompt lengths and still follows the traffic
_MEAN_VALUES: Final = 128
_MARGIN_PREDICTIONS: Final = 100
_MARGIN_MIN_PREDICTIONS: Final = 10
_MARGIN_QUANTILE: Final = 0.9
_MARGIN_MAX: Final = 3.0  # limits the rejections after a short stall of the service
_SPEED_ITERATIONS: Final = 10  # follows a host with drifting speed
_SPEED_MAX: Final = 10.0  # limits the effect of a single delayed iteration


class ArrivalRate:
    """Arrival rate and mean length of the latest prompts placed on an instance."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, int]] = deque()
        self._tokens = 0

    def add(self, tokens: int, now: float) -> None:
        self._arrivals.append((now, tokens))
        self._tokens += tokens
        if len(self._arrivals) > _RATE_PROMPTS:
            self._tokens -= self._arrivals.popleft()[1]

    @property
    def tokens_per_s(self) -> float:
        """Arrival rate in prompt tokens per second; 0 before the second arrival."""
        if len(self._arrivals) < 2:
            return 0.0
        seconds = self._arrivals[-1][0] - self._arrivals[0][0]
        return (self._tokens - self._arrivals[0][1]) / seconds if seconds > 0.0 else 0.0

    @property
    def tokens_per_prompt(self) -> float:
        return self._tokens / len(self._arrivals) if self._arrivals else 0.0


class PredictionMargin:
    """Safety factor for predicted times, from recent ratios of actual to predicted time."""

    def __init__(self) -> None:
        self.factor = 1.0  # 90th percentile of the ratios, from 1 to 3
        self._ratios: deque[float] = deque()
        self._sorted: list[float] = []

    def observe(self, predicted_s: float, actual_s: float) -> None:
        if predicted_s <= 0.0:
            return
        ratio = actual_s / predicted_s
        self._ratios.append(ratio)
        insort(self._sorted, ratio)
        if len(self._ratios) > _MARGIN_PREDICTIONS:
            self._sorted.remove(self._ratios.popleft())
        if len(self._ratios) >= _MARGIN_MIN_PREDICTIONS:
            at = min(int(_MARGIN_QUANTILE * len(self._sorted)), len(self._sorted) - 1)
            self.factor = min(max(1.0, self._sorted[at]), _MARGIN_MAX)


class RunningMean:
    """Mean of the values so far; after many values, an exponential average."""

    def __init__(self) -> None:
        self.value = 0.0
        self._seen = 0

    @property
    def known(self) -> bool:
        return self._seen > 0

    def add(self, value: float) -> None:
        self._seen = min(self._seen + 1, _MEAN_VALUES)
        self.value += (value - self.value) / self._seen


class SpeedFactor:
    """Correction factor of a performance model: mean ratio of measured to predicted iteration times."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._seen = 1  # the model weighs as much as one iteration

    def observe(self, modelled_s: float, measured_s: float) -> None:
        """Update `factor` with the predicted and the measured time of an iteration, in seconds."""
        if modelled_s > 0.0:
            self._seen = min(self._seen + 1, _SPEED_ITERATIONS)
            ratio = min(max(measured_s / modelled_s, 1.0 / _SPEED_MAX), _SPEED_MAX)
            self.factor += (ratio - self.factor) / self._seen


class QueuedPrompt(msgspec.Struct, frozen=True):
    """A queued prompt, with its numbers of cached tokens (`reused`) and of tokens to compute (`tokens`)."""

    request_id: str
    tokens: int
    reused: int = 0
    fetches: bool = False  # cached blocks are first copied from another instance: the start is uncertain

    @property
    def squares(self) -> int:
        """Measure of the prompt's attention cost: (cached + computed tokens)² − (cached tokens)²."""
        return self.tokens * (self.tokens + 2 * self.reused)


class _PredictedIteration:
    """Prompts expected to run in one iteration, and the predicted time of this iteration in seconds."""

    __slots__ = ("prompts", "seconds", "squares", "tokens")

    def __init__(self, prompt: QueuedPrompt, seconds: float) -> None:
        self.prompts = {prompt.request_id: prompt}
        self.tokens, self.squares = prompt.tokens, prompt.squares
        self.seconds = seconds


class PrefillQueue:
    """Predicts the prefill iterations of an instance that batches whole prompts first come, first served."""

    def __init__(self, model: PerformanceModel, max_num_batched_tokens: int, speed: SpeedFactor) -> None:
        # An iteration has up to `max_num_batched_tokens` tokens; a longer prompt runs alone. New prompts can join it
        # until it starts; their number is estimated from recent arrivals. A late iteration should end immediately.
        self._model = model
        self._max_num_batched_tokens = max_num_batched_tokens
        self._speed = speed
        self._iterations: deque[_PredictedIteration] = deque()  # the first one is running
        self._iteration_of: dict[str, _PredictedIteration] = {}
        self._waiting_s = 0.0  # model time of all iterations but the first
        self._arrivals = ArrivalRate()
        self._began = 0.0
        self._ended: float | None = None  # when the first prompt of the running iteration was computed
        self._measures = False  # whether the running iteration may be compared with the model

    def join(self, prompt: QueuedPrompt, now: float) -> None:
        self._requeue_late(now)
        self._arrivals.add(prompt.tokens, now)
        last = self._open_iteration(prompt)
        if last is None:
            last = _PredictedIteration(prompt, self._model.prefill_s(prompt.tokens, prompt.squares))
            self._iterations.append(last)
            if len(self._iterations) > 1:
                self._waiting_s += last.seconds
        else:
            last.prompts[prompt.request_id] = prompt
            self._grow(last, prompt.tokens, prompt.squares)
        self._iteration_of[prompt.request_id] = last
        if len(self._iterations) == 1:
            self._begin(now)

    def done(self, request_id: str, now: float) -> None:
        """Record that a prompt has been computed."""
        self._requeue_late(now)
        iteration = self._iteration_of.get(request_id)
        if iteration is None:
            return
        if iteration is not self._iterations[0]:
            # The first iteration was delayed and starts now at the earliest.
            self._began, self._measures = now, False
        else:
            self._ended = now  # the other prompts of the iteration should end at the same time
            if len(iteration.prompts) == 1:
                self._learn(iteration.tokens, iteration.squares)
        self.drop(request_id, now)

    def drop(self, request_id: str, now: float) -> None:
        """Remove a computed or aborted prompt from the queue."""
        self._requeue_late(now)
        iteration = self._iteration_of.pop(request_id, None)
        if iteration is None:
            return
        prompt = iteration.prompts.pop(request_id)
        if iteration is self._iterations[0]:
            if not iteration.prompts:
                self._iterations.popleft()
                self._begin(now)
            return
        self._grow(iteration, -prompt.tokens, -prompt.squares)
        if not iteration.prompts:
            self._iterations.remove(iteration)

    def wait_s(self, prompt: QueuedPrompt, now: float) -> float:
        """Predict the seconds from `now` until the prefill of `prompt` ends, if `prompt` joins the queue at `now`."""
        self._requeue_late(now)
        joined, before_s = self._open_iteration(prompt), self.busy_s(now)
        if joined is not None:
            before_s -= joined.seconds * self._speed.factor
        # The iteration that the prompt joins or begins, with the arrivals expected until it starts.
        tokens, squares = prompt.tokens, prompt.squares
        if joined is not None:
            tokens, squares = tokens + joined.tokens, squares + joined.squares
        each, free = self._arrivals.tokens_per_prompt, self._max_num_batched_tokens - tokens
        others = min(self._arrivals.tokens_per_s * before_s, free) if each <= free else 0.0
        model_s = self._model.prefill_s(tokens + int(others), squares + int(others * each))
        return before_s + model_s * self._speed.factor

    def oldest_companion(self, prompt: QueuedPrompt, now: float) -> str | None:
        """Return the id of the oldest queued request that would share an iteration with `prompt`, or None."""
        self._requeue_late(now)
        joined = self._open_iteration(prompt)
        return None if joined is None else next(iter(joined.prompts))

    def alone_s(self, prompt: QueuedPrompt) -> float:
        """Predict the prefill time in seconds of a prompt on an idle instance."""
        return self._model.prefill_s(prompt.tokens, prompt.squares) * self._speed.factor

    def busy_s(self, now: float) -> float:
        """Predict the seconds until all queued prompts are computed."""
        self._requeue_late(now)
        return self._remaining_s(now) + self._waiting_s * self._speed.factor if self._iterations else 0.0

    def ends(self, now: float) -> Iterator[tuple[str, float]]:
        """Yield the predicted end of prefill of each queued request, as (request id, time) pairs in order of time."""
        self._requeue_late(now)
        end = now
        for number, iteration in enumerate(self._iterations):
            end += iteration.seconds * self._speed.factor if number else self._remaining_s(now)
            for request_id in iteration.prompts:
                yield request_id, end

    def _requeue_late(self, now: float) -> None:
        """When an iteration ends without computing some of its prompts, move these prompts to the next iteration."""
        if self._ended is None or now <= self._ended or not self._iterations:
            return
        late, ended = self._iterations.popleft(), self._ended
        tokens, squares = late.tokens, late.squares
        late.tokens = sum(prompt.tokens for prompt in late.prompts.values())
        late.squares = sum(prompt.squares for prompt in late.prompts.values())
        self._learn(tokens - late.tokens, squares - late.squares)
        following = self._iterations[0] if self._iterations else None
        if following is not None and following.tokens + late.tokens <= self._max_num_batched_tokens:
            self._iteration_of.update(dict.fromkeys(late.prompts, following))
            following.prompts = late.prompts | following.prompts
            self._grow(following, late.tokens, late.squares)
        else:
            self._iterations.appendleft(late)
            late.seconds = 0.0
            self._grow(late)
        self._begin(ended)

    def _learn(self, tokens: int, squares: int) -> None:
        """Update the ratio of actual to predicted prefill times after an iteration."""
        # Only if the start time of the iteration is certain.
        if self._measures and self._ended is not None and self._ended > self._began:
            self._speed.observe(self._model.prefill_s(tokens, squares), self._ended - self._began)

    def _remaining_s(self, now: float) -> float:
        """Predict the seconds until the running iteration ends."""
        return max(0.0, self._began + self._iterations[0].seconds * self._speed.factor - now)

    def _open_iteration(self, prompt: QueuedPrompt) -> _PredictedIteration | None:
        """Return the last queued iteration if it has not started and has room for `prompt`, else None."""
        last = self._iterations[-1] if len(self._iterations) > 1 else None
        return None if last is None or last.tokens + prompt.tokens > self._max_num_batched_tokens else last

    def _grow(self, waiting: _PredictedIteration, tokens: int = 0, squares: int = 0) -> None:
        """Add tokens to a waiting iteration, or remove them, and predict its time again."""
        waiting.tokens += tokens
        waiting.squares += squares
        seconds = self._model.prefill_s(waiting.tokens, waiting.squares) if waiting.prompts else 0.0
        self._waiting_s += seconds - waiting.seconds
        waiting.seconds = seconds

    def _begin(self, now: float) -> None:
        """Record that the first queued iteration, if any, starts now."""
        self._began, self._ended = now, None
        self._measures = bool(self._iterations) and not any(
            prompt.fetches for prompt in self._iterations[0].prompts.values()
        )
        if len(self._iterations) <= 1:
            self._waiting_s = 0.0  # drops rounding errors
        else:
            self._waiting_s -= self._iterations[0].seconds
