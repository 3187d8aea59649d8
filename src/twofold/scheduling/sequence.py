"""What an instance's scheduler knows of one request."""

from dataclasses import dataclass

from twofold.batch import BatchItem
from twofold.request import Phase, Request


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """Progress of a request on one instance.

    `computed` counts tokens whose KV is in this instance's cache, `generated` output tokens so far wherever
    they were made. `decodes_here` is False on an instance that prefills and then hands off.
    """

    request: Request
    decodes_here: bool
    computed: int = 0
    generated: int = 0

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def prefill_remaining(self) -> int:
        """Prompt tokens still to be computed."""
        return max(0, self.request.prompt_tokens - self.computed)

    @property
    def in_prefill(self) -> bool:
        return self.computed < self.request.prompt_tokens

    @property
    def cache_tokens(self) -> int:
        """Tokens whose KV this instance may come to hold: blocks are taken for all of them at once."""
        return self.request.total_tokens if self.decodes_here else self.request.prompt_tokens

    def prefill_item(self, num_tokens: int) -> BatchItem:
        """The next `num_tokens` tokens of the prompt as work for an iteration."""
        completes = num_tokens == self.prefill_remaining
        return BatchItem(self.id, Phase.PREFILL, num_tokens, self.computed, completes)

    def decode_item(self) -> BatchItem:
        """One more output token as work for an iteration."""
        return BatchItem(self.id, Phase.DECODE, 1, self.computed, True)
