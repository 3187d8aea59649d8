"""KV reservation: how many tokens of KV cache a request reserves, and when."""


class KvReservation:
    """KV tokens that a request reserves on the instances it runs on.

    By default the whole request is reserved where it decodes, so an admitted request always finishes. With
    `output_at_decode_start` the output is reserved with the first decode iteration, and a request may wait for it
    with its prompt's KV in place. With `step` the output is reserved so many tokens at a time (`SwapPreemption`).
    `extra` tokens are added to every prompt.
    """

    __slots__ = ("extra", "output_at_decode_start", "step")

    def __init__(self, output_at_decode_start: bool = False, extra: int = 0, step: int = 0) -> None:
        self.output_at_decode_start = output_at_decode_start
        self.extra = extra
        self.step = step

    def at_start(self, prompt: int, output: int, decodes_here: bool) -> int:
        """Tokens reserved before prefill, or before the KV cache arrives from another instance."""
        if self.output_at_decode_start or not decodes_here:
            return prompt + self.extra
        if self.step:
            return prompt + min(self.step, output - 1) + self.extra
        return prompt + output - 1 + self.extra

    def at_decode_start(self, output: int) -> int:
        """Tokens added with the first decode iteration."""
        return output - 1 if self.output_at_decode_start else 0

    def in_all(self, prompt: int, output: int) -> int:
        """Tokens held at the end on the instance that decodes."""
        return prompt + output - 1 + self.extra


FULL_RESERVATION = KvReservation()
