"""What an answer has used so far, counted as its tokens come."""

from collections.abc import Sequence

from twofold.serving.gateway.choice import Delta
from twofold.serving.gateway.planning import Planned
from twofold.serving.gateway.responses import PromptTokensDetails, Usage


class UsageCount:
    """Counts the tokens of one answer, whose choices are `planned`.

    Each prompt counts once. What of it was found in a cache is what none of its choices computed, of those that
    have begun.
    """

    def __init__(self, prompt_tokens: int, planned: Sequence[Planned]) -> None:
        self._prompt_tokens = prompt_tokens
        self._prompts = [each.prompt for each in planned]
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}  # by prompt

    def add(self, delta: Delta) -> None:
        """A token was made."""
        self._completion_tokens += 1
        if delta.token.index == 0:
            prompt, cached = self._prompts[delta.choice], delta.token.reused_tokens
            self._cached[prompt] = min(cached, self._cached.get(prompt, cached))

    @property
    def usage(self) -> Usage:
        """What has been used until now."""
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
        )
