"""The decoding requests of one instance, as overload control sees them."""

from collections.abc import Iterator

from twofold.performance.base import PerformanceModel
from twofold.scheduling.admission.estimates import SpeedFactor


class DecodeLoad:
    """A number of sequences and the sum of their prompt tokens."""

    __slots__ = ("prompt_tokens", "sequences")

    def __init__(self, sequences: int = 0, prompt_tokens: int = 0) -> None:
        self.sequences = sequences
        self.prompt_tokens = prompt_tokens

    def __add__(self, other: "DecodeLoad") -> "DecodeLoad":
        return DecodeLoad(self.sequences + other.sequences, self.prompt_tokens + other.prompt_tokens)

    def __sub__(self, other: "DecodeLoad") -> "DecodeLoad":
        return DecodeLoad(self.sequences - other.sequences, self.prompt_tokens - other.prompt_tokens)


class InstanceDecodes:
    """The requests that decode on an instance (`current`) and those still in prefill for it (`promised`).

    Times are those of `model`, corrected by `speed`. Beyond `max_num_seqs` sequences or `capacity_tokens` KV tokens,
    sequences take turns, and the time between tokens grows at least in proportion.
    """

    def __init__(self, model: PerformanceModel, max_num_seqs: int, capacity_tokens: int, speed: SpeedFactor) -> None:
        self.current, self.promised = DecodeLoad(), DecodeLoad()
        self._model = model
        self._speed = speed
        self._max_num_seqs = max_num_seqs
        self._capacity_tokens = capacity_tokens
        self._coming: dict[str, DecodeLoad] = {}
        self._members: dict[str, tuple[float, DecodeLoad]] = {}  # with the start of decode, in that order

    def promise(self, request_id: str, prompt_tokens: int) -> None:
        """Announce a request that will decode here after its prefill."""
        self._coming[request_id] = one = DecodeLoad(1, prompt_tokens)
        self.promised += one

    def join(self, request_id: str, now: float) -> None:
        """An announced request starts to decode."""
        one = self._coming.pop(request_id)
        self.promised -= one
        self._members[request_id] = now, one
        self.current += one

    def leave(self, request_id: str) -> float | None:
        """Remove a request; returns when it started to decode, or None if it did not."""
        came = self._coming.pop(request_id, None)
        if came is not None:
            self.promised -= came
        began, one = self._members.pop(request_id, (None, None))
        if one is not None:
            self.current -= one
        return began

    def members(self) -> Iterator[tuple[float, DecodeLoad]]:
        """The decoding requests with the start of their decode, earliest first."""
        return iter(self._members.values())

    def coming(self, request_id: str) -> DecodeLoad | None:
        """The load of an announced request; None for any other."""
        return self._coming.get(request_id)

    def observe_iteration(self, sequences: int, seconds: float, written: float) -> None:
        """Learn from the time of an iteration of sequences with `written` output tokens on average."""
        if self.current.sequences:
            prompt_tokens = self.current.prompt_tokens / self.current.sequences
            modelled_s = self._iteration_s(sequences, sequences * (prompt_tokens + written))
            self._speed.observe(modelled_s, seconds)

    def tbt_s(self, load: DecodeLoad, written: float) -> float:
        """Predicted time between tokens of sequences with `written` output tokens on average, in seconds."""
        sequences = load.sequences
        if not sequences:
            return 0.0
        context = load.prompt_tokens + sequences * written
        rounds = max(1.0, sequences / self._max_num_seqs, context / self._capacity_tokens)
        return rounds * self._iteration_s(min(sequences, self._max_num_seqs), context) * self._speed.factor

    def _iteration_s(self, sequences: int, context: float) -> float:
        """The iteration time of the model without correction."""
        cost = self._model.decode_cost(sequences)
        return cost.base_s + cost.context_s * context
