"""The requests that decode on one instance, or are to, as far as a cluster knows of them."""

from collections.abc import Iterator

from twofold.performance.base import PerformanceModel
from twofold.scheduling.admission.estimates import SpeedFactor


class DecodeLoad:
    """So many sequences whose prompts have so many tokens between them."""

    __slots__ = ("prompt_tokens", "sequences")

    def __init__(self, sequences: int = 0, prompt_tokens: int = 0) -> None:
        self.sequences = sequences
        self.prompt_tokens = prompt_tokens

    def __add__(self, other: "DecodeLoad") -> "DecodeLoad":
        return DecodeLoad(self.sequences + other.sequences, self.prompt_tokens + other.prompt_tokens)

    def __sub__(self, other: "DecodeLoad") -> "DecodeLoad":
        return DecodeLoad(self.sequences - other.sequences, self.prompt_tokens - other.prompt_tokens)


class InstanceDecodes:
    """Requests in the order in which their first tokens came.

    Of more than `max_num_seqs` sequences, or than `capacity_tokens` KV tokens, some wait while others run: the
    time between
    tokens then grows in proportion, at least. Times are those of `model`, corrected by `speed`.
    """

    def __init__(
        self, model: PerformanceModel, max_num_seqs: int, capacity_tokens: int, speed: SpeedFactor
    ) -> None:
        self.here, self.promised = DecodeLoad(), DecodeLoad()
        self._model = model
        self._speed = speed
        self._max_seqs = max_num_seqs
        self._capacity_tokens = capacity_tokens
        self._coming: dict[str, DecodeLoad] = {}
        self._members: dict[str, tuple[float, DecodeLoad]] = {}  # and when each began

    def promise(self, request_id: str, prompt_tokens: int) -> None:
        """A prompt is being computed that is to be decoded here."""
        self._coming[request_id] = one = DecodeLoad(1, prompt_tokens)
        self.promised += one

    def join(self, request_id: str, now: float) -> None:
        """The prompt is computed, and decodes here from now on."""
        one = self._coming.pop(request_id)
        self.promised -= one
        self._members[request_id] = now, one
        self.here += one

    def leave(self, request_id: str) -> float | None:
        """It has ended, if it was here or to come; returns when it began to decode, None if it did not."""
        came = self._coming.pop(request_id, None)
        if came is not None:
            self.promised -= came
        began, one = self._members.pop(request_id, (None, None))
        if one is not None:
            self.here -= one
        return began

    def members(self) -> Iterator[tuple[float, DecodeLoad]]:
        """When each began to decode, earliest first."""
        return iter(self._members.values())

    def coming(self, request_id: str) -> DecodeLoad | None:
        """One that is to come; None for any other."""
        return self._coming.get(request_id)

    def stepped(self, sequences: int, seconds: float, written: float) -> None:
        """An iteration of so many sequences, which have written so many tokens on average, took so long."""
        if self.here.sequences:
            prompt_tokens = self.here.prompt_tokens / self.here.sequences
            self._speed.took(self._iteration_s(sequences, sequences * (prompt_tokens + written)), seconds)

    def tbt_s(self, together: DecodeLoad, written: float) -> float:
        """Seconds between two tokens of each of so many, which have written so many on average."""
        sequences = together.sequences
        if not sequences:
            return 0.0
        context = together.prompt_tokens + sequences * written
        waits = max(1.0, sequences / self._max_seqs, context / self._capacity_tokens)
        return waits * self._iteration_s(min(sequences, self._max_seqs), context) * self._speed.factor

    def _iteration_s(self, sequences: int, context: float) -> float:
        """As the model says."""
        cost = self._model.decode_cost(sequences)
        return cost.base_s + cost.context_s * context
