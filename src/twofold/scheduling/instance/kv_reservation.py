"""How much KV memory a request takes, and when."""


class KvReservation:
    """Tokens of KV that a request of so many prompt and output tokens takes on the instances it runs on.

    By default all of it at once, where it decodes: an admitted request can then always run to its end. With
    `output_at_decode_start` the output's share is taken when its first decode iteration starts, and a request
    may wait for it with its prompt's KV in place. With `step` the output takes so many tokens at a time, the first of
    them at the start (`Growth`). `extra` tokens are counted on top of each prompt.
    """

    __slots__ = ("extra", "output_at_decode_start", "step")

    def __init__(self, output_at_decode_start: bool = False, extra: int = 0, step: int = 0) -> None:
        self.output_at_decode_start = output_at_decode_start
        self.extra = extra
        self.step = step

    def at_start(self, prompt: int, output: int, decodes_here: bool) -> int:
        """Tokens taken before prefill, or before the KV cache arrives from elsewhere."""
        if self.output_at_decode_start or not decodes_here:
            return prompt + self.extra
        if self.step:
            return prompt + min(self.step, output - 1) + self.extra
        return prompt + output - 1 + self.extra

    def at_decode_start(self, output: int) -> int:
        """Tokens taken on top of that with the first decode iteration."""
        return output - 1 if self.output_at_decode_start else 0

    def in_all(self, prompt: int, output: int) -> int:
        """Tokens taken in the end where the request decodes."""
        return prompt + output - 1 + self.extra


FULL_RESERVATION = KvReservation()
