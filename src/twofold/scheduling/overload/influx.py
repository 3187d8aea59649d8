"""How much comes to an instance, as far as was seen lately."""

from collections import deque
from typing import Final

_KEPT: Final = 32  # prompts: enough to even out their lengths, few enough to follow the traffic


class Influx:
    """The prompts that were placed on an instance last."""

    def __init__(self) -> None:
        self._came: deque[tuple[float, int]] = deque()
        self._tokens = 0

    def came(self, tokens: int, now: float) -> None:
        """A prompt of so many tokens."""
        self._came.append((now, tokens))
        self._tokens += tokens
        if len(self._came) > _KEPT:
            self._tokens -= self._came.popleft()[1]

    @property
    def tokens_per_s(self) -> float:
        """0 where too few have come to say."""
        if len(self._came) < 2:
            return 0.0
        seconds = self._came[-1][0] - self._came[0][0]
        return (self._tokens - self._came[0][1]) / seconds if seconds > 0.0 else 0.0

    @property
    def tokens_each(self) -> float:
        """Of a prompt, on average."""
        return self._tokens / len(self._came) if self._came else 0.0
