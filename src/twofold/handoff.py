"""Hand-offs: the transfer of a request's KV cache from its prefill to its decode instance."""

from enum import StrEnum
from typing import Protocol

import msgspec


class HandoffMode(StrEnum):
    """Mode of a KV transfer: when it happens, and which instance starts it (Splitwise 4.3; for pull, DistServe 4.3)."""

    SERIALIZED = "serialized"  # all layers after the last one is computed
    LAYER_WISE = "layer-wise"  # layer k while layer k+1 computes
    PULL = "pull"  # read by the decode side when it has room, once all layers are computed


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Permission for the instance `source` to write a request's KV cache into `blocks` of `instance`.

    `epoch` changes whenever `instance` restarts; data of an outdated epoch is refused. The lease expires at
    `deadline_s` on the clock of `instance`, unless a heartbeat of `source` renews it.
    """

    request_id: str
    source: str
    instance: str
    epoch: int
    blocks: tuple[int, ...]
    deadline_s: float


class LeaseWatcher(Protocol):
    """Observer of leases: `granted` is called before the first write, `ended` before the blocks are freed."""

    def granted(self, lease: Lease) -> None: ...

    def ended(self, lease: Lease) -> None: ...
