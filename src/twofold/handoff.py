"""A hand-off: how the KV cache of a request travels from the instance that prefilled it to the one that decodes."""

from enum import StrEnum
from typing import Protocol

import msgspec


class HandoffMode(StrEnum):
    """When the KV cache is sent, and by whom (Splitwise section 4.3; DistServe section 4.3 for pull)."""

    SERIALIZED = "serialized"  # all layers after the last one is computed
    LAYER_WISE = "layer-wise"  # layer k while layer k+1 computes
    PULL = "pull"  # read by the decode side when it has room, once all layers are computed


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right of `source` to write a request's KV into `blocks` of `instance`.

    `epoch` names one life of `instance`: data and messages that carry another one are refused. The right
    ends at `deadline_s` on the clock of `instance` unless `source` renews it by heartbeat.
    """

    request_id: str
    source: str
    instance: str
    epoch: int
    blocks: tuple[int, ...]
    deadline_s: float


class LeaseWatcher(Protocol):
    """Told of each lease as it begins and as it ends: before its blocks may be written, and before they are free."""

    def granted(self, lease: Lease) -> None: ...

    def ended(self, lease: Lease) -> None: ...
