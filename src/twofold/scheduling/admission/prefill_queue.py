"""The prompts on their way through one prefill instance, and when each of them will be done."""

from collections import deque
from collections.abc import Iterator

from twofold.performance.base import PerformanceModel
from twofold.scheduling.admission.estimates import ArrivalRate, SpeedFactor


class QueuedPrompt:
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

    def __init__(self, prompt: QueuedPrompt, seconds: float) -> None:
        self.prompts = {prompt.request_id: prompt}
        self.tokens, self.squares = prompt.tokens, prompt.squares
        self.seconds = seconds


class PrefillQueue:
    """Batches prompts as the instance does: whole, first come first, up to `max_num_batched_tokens` tokens in
    an iteration, of
    which a longer one has one for itself.

    Times are those of `model`, corrected by `speed`, which learns from each iteration. One that takes longer than it
    should is expected to end right now. Until an iteration begins others join it, and all in it wait for them:
    they are expected to come as they came lately.
    """

    def __init__(self, model: PerformanceModel, max_num_batched_tokens: int, speed: SpeedFactor) -> None:
        self._model = model
        self._token_budget = max_num_batched_tokens
        self._speed = speed
        self._iterations: deque[_Iteration] = deque()  # the first of them is under way
        self._where: dict[str, _Iteration] = {}
        self._waiting_s = 0.0  # of all but the first, as the model says
        self._influx = ArrivalRate()
        self._began = 0.0
        self._ended: float | None = None  # when the first prompt of the iteration under way was computed
        self._measures = False  # whether the end of the first is still to be compared with what was expected

    def __len__(self) -> int:
        return len(self._where)

    def join(self, prompt: QueuedPrompt, now: float) -> None:
        """A prompt was placed here."""
        self._part_late(now)
        self._influx.came(prompt.tokens, now)
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
        self._part_late(now)
        iteration = self._where.get(request_id)
        if iteration is None:
            return
        if iteration is not self._iterations[0]:
            # The first one has waited for something, and runs now at the soonest.
            self._began, self._measures = now, False
        else:
            self._ended = now
            if len(iteration.prompts) == 1:
                self._learn(iteration.tokens, iteration.squares)
        self.drop(request_id, now)

    def drop(self, request_id: str, now: float) -> None:
        """A request is not here any more, whatever it did."""
        self._part_late(now)
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

    def wait_s(self, prompt: QueuedPrompt, now: float) -> float:
        """Seconds until this one would be computed, if it joined now."""
        self._part_late(now)
        joined, before_s = self._open(prompt), self.busy_s(now)
        if joined is not None:
            before_s -= joined.seconds * self._speed.factor
        return before_s + self._with_others_s(prompt, joined, before_s) * self._speed.factor

    def first_with(self, prompt: QueuedPrompt, now: float) -> str | None:
        """Who has been longest in the iteration that a prompt would join now; None if it is the first itself."""
        self._part_late(now)
        joined = self._open(prompt)
        return None if joined is None else next(iter(joined.prompts))

    def alone_s(self, prompt: QueuedPrompt) -> float:
        """Seconds of the prefill of a prompt that has the instance to itself."""
        return self._model_s(prompt) * self._speed.factor

    def busy_s(self, now: float) -> float:
        """Seconds until all that is here will be computed."""
        self._part_late(now)
        return self._left_s(now) + self._waiting_s * self._speed.factor if self._iterations else 0.0

    def ends(self, now: float) -> Iterator[tuple[str, float]]:
        """Which prompts will be computed when, in that order."""
        self._part_late(now)
        end = now
        for number, iteration in enumerate(self._iterations):
            end += iteration.seconds * self._speed.factor if number else self._left_s(now)
            for request_id in iteration.prompts:
                yield request_id, end

    def _model_s(self, prompt: QueuedPrompt) -> float:
        """Seconds of the prefill of a prompt alone, as the model says."""
        return self._model.prefill_s(prompt.tokens, prompt.squares)

    def _with_others_s(self, prompt: QueuedPrompt, joined: _Iteration | None, before_s: float) -> float:
        """Seconds of the iteration that a prompt joins, or begins, with those who come until it starts."""
        tokens, squares = prompt.tokens, prompt.squares
        if joined is not None:
            tokens, squares = tokens + joined.tokens, squares + joined.squares
        each, room = self._influx.tokens_each, self._token_budget - tokens
        others = min(self._influx.tokens_per_s * before_s, room) if each <= room else 0.0
        return self._model.prefill_s(tokens + int(others), squares + int(others * each))

    def _part_late(self, now: float) -> None:
        """Who was thought to be in the iteration that has ended, and was not, is in the next one."""
        if self._ended is None or now <= self._ended or not self._iterations:
            return
        late, ended = self._iterations.popleft(), self._ended
        tokens, squares = late.tokens, late.squares
        late.tokens = sum(prompt.tokens for prompt in late.prompts.values())
        late.squares = sum(prompt.squares for prompt in late.prompts.values())
        self._learn(tokens - late.tokens, squares - late.squares)
        following = self._iterations[0] if self._iterations else None
        if following is not None and following.tokens + late.tokens <= self._token_budget:
            self._where.update(dict.fromkeys(late.prompts, following))
            following.prompts = late.prompts | following.prompts
            following.tokens += late.tokens
            following.squares += late.squares
            self._set_seconds(following)
        else:
            self._iterations.appendleft(late)
            late.seconds = 0.0
            self._set_seconds(late)
        self._begin(ended)

    def _learn(self, tokens: int, squares: int) -> None:
        """What the iteration that has ended took for so many tokens, unless it is not known when it began."""
        if self._measures and self._ended is not None and self._ended > self._began:
            self._speed.took(self._model.prefill_s(tokens, squares), self._ended - self._began)

    def _left_s(self, now: float) -> float:
        """Of the iteration under way."""
        return max(0.0, self._began + self._iterations[0].seconds * self._speed.factor - now)

    def _open(self, prompt: QueuedPrompt) -> _Iteration | None:
        """The iteration that a prompt would join: the last one, unless it runs already or would become too long."""
        last = self._iterations[-1] if len(self._iterations) > 1 else None
        return None if last is None or last.tokens + prompt.tokens > self._token_budget else last

    def _set_seconds(self, waiting: _Iteration) -> None:
        seconds = self._model.prefill_s(waiting.tokens, waiting.squares) if waiting.prompts else 0.0
        self._waiting_s += seconds - waiting.seconds
        waiting.seconds = seconds

    def _begin(self, now: float) -> None:
        """The first iteration, if there is one, is under way from now on."""
        self._began, self._ended = now, None
        self._measures = bool(self._iterations) and not any(
            prompt.fetches for prompt in self._iterations[0].prompts.values()
        )
        if len(self._iterations) <= 1:
            self._waiting_s = 0.0  # and nothing of what rounding left
        else:
            self._waiting_s -= self._iterations[0].seconds
