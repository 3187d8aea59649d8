"""The sequences of an instance, by what they wait for."""

from twofold.scheduling.decode_set import DecodeSet
from twofold.scheduling.line import Line


class Queues:
    """Lines in order of entry.

    `waiting`: prompts not started. `prefilling`: prompts computed in part. `ready`: the KV cache of the prompt
    is in place and no decode iteration was run yet. `decoding`: one token each in every iteration. `paused`:
    pre-empted decodes, which keep their memory.
    """

    __slots__ = ("decoding", "paused", "prefilling", "ready", "waiting")

    def __init__(self) -> None:
        self.waiting = Line()
        self.prefilling = Line()
        self.ready = Line()
        self.decoding = DecodeSet()
        self.paused = Line()

    @property
    def started(self) -> int:
        """Sequences that hold a seat of the running set."""
        return self.prefilling.size + self.ready.size + self.decoding.size + self.paused.size

    @property
    def settled(self) -> bool:
        """Nothing waits for anything but its next decode iteration."""
        return not (self.waiting.size or self.ready.size or self.prefilling.size or self.paused.size)
