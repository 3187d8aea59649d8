"""What an instance's scheduler knows of one request."""

from twofold.batch import BatchItem
from twofold.request import Phase, Request


class ScheduledSequence:
    """Progress of a request on one instance.

    `computed` counts tokens whose KV is in this instance's cache, `generated` output tokens so far wherever
    they were made; while the sequence decodes, both stand as they were when it joined the decode set, which
    keeps count from there. `decodes_here` is False on an instance that prefills and then hands off.
    `start_tokens` and `decode_tokens` say how much KV memory it takes when (see `MemoryRule`).
    """

    # The decode set's own: at which of its iterations, and as the how-manieth, this sequence joined it.
    # For the driver: when it last gave a token, on the driver's clock.
    __slots__ = (
        "computed",
        "decode_tokens",
        "decodes_here",
        "generated",
        "join_number",
        "joined_at",
        "last_token_at",
        "request",
        "start_tokens",
    )

    def __init__(
        self,
        request: Request,
        decodes_here: bool,
        start_tokens: int,
        decode_tokens: int = 0,
        computed: int = 0,
        generated: int = 0,
        joined_at: int = 0,
        join_number: int = -1,
        last_token_at: int = 0,
    ) -> None:
        self.request = request
        self.decodes_here = decodes_here
        self.start_tokens = start_tokens
        self.decode_tokens = decode_tokens
        self.computed = computed
        self.generated = generated
        self.joined_at = joined_at
        self.join_number = join_number
        self.last_token_at = last_token_at

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def prefill_remaining(self) -> int:
        """Prompt tokens still to be computed."""
        return max(0, self.request.prompt_tokens - self.computed)

    def prefill_item(self, num_tokens: int) -> BatchItem:
        """The next `num_tokens` tokens of the prompt as work for an iteration."""
        completes = num_tokens == self.request.prompt_tokens - self.computed
        return BatchItem(self.request.id, Phase.PREFILL, num_tokens, self.computed, completes)
