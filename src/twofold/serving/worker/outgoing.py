"""One hand-off on its way out: what is computed, what is sent, and what is still missing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from twofold.handoff import HandoffMode, Lease


class Turn(Enum):
    """What the sender has to do next for a hand-off."""

    NOTHING = auto()
    WRITE = auto()  # layers that may be sent
    OFFER = auto()  # its target may read it
    END = auto()


@dataclass(slots=True, eq=False)
class Outgoing:
    """The sending side of one hand-off.

    `layers_computed` counts the layers whose KV is complete in the local `blocks`, `layers_sent` those that
    are in the lease's blocks. `first_token` is set once the prefill is over. A pulled hand-off is `offered` to its
    target, and nothing frees its blocks until that has `taken` them, or will not read them any more.
    `checksums` are those of the blocks, as far as they were sent.
    """

    request_id: str
    target: str
    mode: HandoffMode
    blocks: Sequence[int] = ()
    lease: Lease | None = None
    first_token: int | None = None
    layers_computed: int = 0
    layers_sent: int = 0
    bytes_moved: int = 0
    started_s: float | None = None
    offered: bool = False
    taken: bool = False
    cancelled: bool = False
    error: str | None = None
    queued: bool = False
    checksums: list[int] = field(default_factory=list)

    @property
    def sendable(self) -> int:
        """How many layers, counted from the first, may be sent now."""
        if self.lease is None or self.mode is HandoffMode.PULL:
            return 0
        if self.mode is HandoffMode.SERIALIZED and self.first_token is None:
            return 0
        return self.layers_computed

    def turn(self, num_layers: int) -> Turn:
        """What is to be done next."""
        if self.offered:
            return Turn.END if self.taken else Turn.NOTHING
        if self.cancelled:
            return Turn.END
        if self.layers_sent < self.sendable:
            return Turn.WRITE
        if self.first_token is None or self.lease is None:
            return Turn.NOTHING
        if self.mode is HandoffMode.PULL:
            return Turn.OFFER
        return Turn.END if self.layers_sent == num_layers else Turn.NOTHING

    def give_up(self, error: str) -> None:
        """It cannot be completed; the request fails for this reason."""
        self.cancelled, self.error = True, error
