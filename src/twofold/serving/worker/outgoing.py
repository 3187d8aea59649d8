"""One hand-off on its way out: what is computed, what is sent, and what is still missing."""

from collections.abc import Sequence
from dataclasses import dataclass

from twofold.handoff import HandoffMode, Lease


@dataclass(slots=True, eq=False)
class Outgoing:
    """The sending side of one hand-off.

    `layers_computed` counts the layers whose KV is complete in the local `blocks`, `layers_sent` those that
    are in the lease's blocks. `first_token` is set once the prefill is over.
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
    cancelled: bool = False
    error: str | None = None
    queued: bool = False

    @property
    def sendable(self) -> int:
        """How many layers, counted from the first, may be sent now."""
        if self.lease is None:
            return 0
        if self.mode is HandoffMode.SERIALIZED and self.first_token is None:
            return 0
        return self.layers_computed

    @property
    def needs_sender(self) -> bool:
        """Whether there is something for the sender to do."""
        over = self.first_token is not None and self.lease is not None
        return self.cancelled or over or self.layers_sent < self.sendable

    def give_up(self, error: str) -> None:
        """It cannot be completed; the request fails for this reason."""
        self.cancelled, self.error = True, error
