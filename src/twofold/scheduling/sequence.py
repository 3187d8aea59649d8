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
        "id",
        "join_number",
        "joined_at",
        "last_token_at",
        "output_tokens",
        "prompt_tokens",
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
        # Again what the request says, because they are asked for at every step.
        self.id = request.id
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        self.decodes_here = decodes_here
        self.start_tokens = start_tokens
        self.decode_tokens = decode_tokens
        self.computed = computed
        self.generated = generated
        self.joined_at = joined_at
        self.join_number = join_number
        self.last_token_at = last_token_at

    @property
    def prefill_remaining(self) -> int:
        """Prompt tokens still to be computed."""
        return max(0, self.prompt_tokens - self.computed)

    def prefill(self, num_tokens: int) -> "PrefillPart":
        """The next `num_tokens` tokens of the prompt as work for an iteration."""
        completes = num_tokens == self.prompt_tokens - self.computed
        return PrefillPart(self, num_tokens, self.computed, completes)


class PrefillPart:
    """A prompt's part in an iteration: what its `BatchItem` says, and whose it is."""

    __slots__ = ("context_tokens", "num_tokens", "samples", "sequence")

    def __init__(
        self, sequence: ScheduledSequence, num_tokens: int, context_tokens: int, samples: bool
    ) -> None:
        self.sequence = sequence
        self.num_tokens = num_tokens
        self.context_tokens = context_tokens
        self.samples = samples

    @property
    def request_id(self) -> str:
        return self.sequence.id

    def item(self) -> BatchItem:
        return BatchItem(self.sequence.id, Phase.PREFILL, self.num_tokens, self.context_tokens, self.samples)
