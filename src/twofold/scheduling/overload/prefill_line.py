"""The prompts on their way through one prefill instance, and when each of them will be done."""

from collections import deque
from collections.abc import Iterator

from twofold.performance.base import PerformanceModel
from twofold.scheduling.overload.speed import Speed


class Prompt:
    """A prompt of which `tokens` tokens are to be computed, after `reused` that are not; if it `fetches` some of those
    from elsewhere it may have to wait for them while others run."""

    __slots__ = ("fetches", "request_id", "reused", "tokens")

    def __init__(self, request_id: str, tokens: int, reused: int = 0, *, fetches: bool = False) -> None:
        self.fetches = fetches
        self.request_id = request_id
        self.tokens = tokens
        self.reused = reused

    @property
    def squares(self) -> int:
        """See `PerformanceModel.prefill_s`."""
        return self.tokens * (self.tokens + 2 * self.reused)


class _Iteration:
    """Prompts that will be computed together, in `seconds` as the model says."""

    __slots__ = ("prompts", "seconds", "squares", "tokens")

    def __init__(self, prompt: Prompt, seconds: float) -> None:
        self.prompts = {prompt.request_id: prompt}
        self.tokens, self.squares = prompt.tokens, prompt.squares
        self.seconds = seconds


class PrefillLine:
    """Batches prompts as the instance does: whole, first come first, up to `token_budget` tokens in an iteration, of
    which a longer one has one for itself.

    Times are those of `model`, corrected by `speed`, which learns from each iteration. One that takes longer than it
    should is expected to end right now.
    """

    def __init__(self, model: PerformanceModel, token_budget: int, speed: Speed) -> None:
        self._model = model
        self._token_budget = token_budget
        self._speed = speed
        self._iterations: deque[_Iteration] = deque()  # the first of them is under way
        self._where: dict[str, _Iteration] = {}
        self._waiting_s = 0.0  # of all but the first, as the model says
        self._began = 0.0
        self._measures = False  # whether the end of the first is still to be compared with what was expected

    def __len__(self) -> int:
        return len(self._where)

    def join(self, prompt: Prompt, now: float) -> None:
        """A prompt was placed here."""
        last = self._open(prompt)
        if last is None:
            last = _Iteration(prompt, self._model_s(prompt))
            self._iterations.append(last)
            if len(self._iterations) > 1:
                self._waiting_s += last.seconds
        else:
            last.prompts[prompt.request_id] = prompt
            last.tokens += prompt.tokens
            last.squares += prompt.squares
            self._set_seconds(last)
        self._where[prompt.request_id] = last
        if len(self._iterations) == 1:
            self._begin(now)

    def done(self, request_id: str, now: float) -> None:
        """A prompt is computed, and with it the others of its iteration."""
        iteration = self._where.get(request_id)
        if iteration is None:
            return
        if (
            iteration is not self._iterations[0]
        ):  # the first one has waited for something, and runs now at the soonest
            self._began, self._measures = now, False
        elif self._measures and now > self._began:
            self._speed.took(iteration.seconds, now - self._began)
            self._measures = False
        self.drop(request_id, now)

    def drop(self, request_id: str, now: float) -> None:
        """A request is not here any more, whatever it did."""
        iteration = self._where.pop(request_id, None)
        if iteration is None:
            return
        prompt = iteration.prompts.pop(request_id)
        if iteration is self._iterations[0]:
            if not iteration.prompts:
                self._iterations.popleft()
                self._begin(now)
            return
        iteration.tokens -= prompt.tokens
        iteration.squares -= prompt.squares
        self._set_seconds(iteration)
        if not iteration.prompts:
            self._iterations.remove(iteration)

    def wait_s(self, prompt: Prompt, now: float) -> float:
        """Seconds until this one would be computed, if it joined now."""
        joined = self._open(prompt)
        own_s, instead_s = self._model_s(prompt), 0.0
        if joined is not None:
            own_s = self._model.prefill_s(joined.tokens + prompt.tokens, joined.squares + prompt.squares)
            instead_s = joined.seconds
        return self.busy_s(now) + (own_s - instead_s) * self._speed.factor

    def alone_s(self, prompt: Prompt) -> float:
        """Seconds of the prefill of a prompt that has the instance to itself."""
        return self._model_s(prompt) * self._speed.factor

    def busy_s(self, now: float) -> float:
        """Seconds until all that is here will be computed."""
        return self._left_s(now) + self._waiting_s * self._speed.factor if self._iterations else 0.0

    def ends(self, now: float) -> Iterator[tuple[str, float]]:
        """Which prompts will be computed when, in that order."""
        end = now
        for number, iteration in enumerate(self._iterations):
            end += iteration.seconds * self._speed.factor if number else self._left_s(now)
            for request_id in iteration.prompts:
                yield request_id, end

    def _model_s(self, prompt: Prompt) -> float:
        """Seconds of the prefill of a prompt alone, as the model says."""
        return self._model.prefill_s(prompt.tokens, prompt.squares)

    def _left_s(self, now: float) -> float:
        """Of the iteration under way."""
        return max(0.0, self._began + self._iterations[0].seconds * self._speed.factor - now)

    def _open(self, prompt: Prompt) -> _Iteration | None:
        """The iteration that a prompt would join: the last one, unless it runs already or would become too long."""
        last = self._iterations[-1] if len(self._iterations) > 1 else None
        return None if last is None or last.tokens + prompt.tokens > self._token_budget else last

    def _set_seconds(self, waiting: _Iteration) -> None:
        seconds = self._model.prefill_s(waiting.tokens, waiting.squares) if waiting.prompts else 0.0
        self._waiting_s += seconds - waiting.seconds
        waiting.seconds = seconds

    def _begin(self, now: float) -> None:
        """The first iteration, if there is one, is under way from now on."""
        self._began = now
        self._measures = bool(self._iterations) and not any(
            prompt.fetches for prompt in self._iterations[0].prompts.values()
        )
        if len(self._iterations) <= 1:
            self._waiting_s = 0.0  # and nothing of what rounding left
        else:
            self._waiting_s -= self._iterations[0].seconds
