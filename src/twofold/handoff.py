"""Hand-offs: the transfer of a request's KV cache from its prefill to its decode instance."""

from enum import StrEnum
from typing import Protocol

import msgspec


class HandoffMode(StrEnum):
    """Mode of a KV transfer: serialized or layer-wise (Splitwise, section 4.3), or pull (DistServe, section 4.3)."""

    SERIALIZED = "serialized"  # all layers after the last one is computed
    LAYER_WISE = "layer-wise"  # layer k while layer k+1 computes
    PULL = "pull"  # read by the decode side when it has room, once all layers are computed


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Permission for one instance (`source`) to write a request's KV cache into blocks of another (`instance`)."""

    request_id: str
    source: str
    instance: str
    epoch: int  # changes whenever `instance` restarts; data of an outdated epoch is refused
    blocks: tuple[int, ...]
    cached_blocks: int = 0  # leading blocks of the prompt that `instance` has cached; `blocks` follow them
    deadline_s: float  # on the clock of `instance`; heartbeats of `source` renew the lease


class LeaseWatcher(Protocol):
    """Observer of granted and ended leases."""

    def granted(self, lease: Lease) -> None: ...  # before the first write

    def ended(self, lease: Lease) -> None: ...  # before the blocks are freed
