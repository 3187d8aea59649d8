"""Interface between vLLM's KV connectors and the worker, which run in one process.

vLLM passes connectors nothing but its configuration, so they look up the worker's `ConnectorBridge` in `BRIDGES`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from twofold.engine.base import KvLayout


class VllmBlockCounts(NamedTuple):
    """Numbers of blocks in vLLM's block pool. `free` includes cached blocks that no request uses."""

    total: int
    free: int


class SettledTransfers(NamedTuple):
    """Ids of requests whose transfer has ended. vLLM may now free blocks of `sent` and use blocks of `received`."""

    sent: set[str]
    received: set[str]


class ConnectorBridge(Protocol):
    """Interface of the worker for vLLM's KV connector. All methods are called on the thread that runs vLLM."""

    def place_cache(self, layout: KvLayout, num_blocks: int) -> torch.Tensor:
        """Return memory for the KV cache that peers can access, as a uint8 tensor [bytes of the KV pool]."""

    def is_remote(self, request_id: str) -> bool:
        """Return whether a peer computes the KV of this request's prompt."""

    def allocated(self, request_id: str, blocks: Sequence[int]) -> None:
        """Record that vLLM has allocated `blocks` for a prompt whose KV a peer computes. The peer may write to them."""

    def prefills_start(self, request_ids: Sequence[str]) -> None:
        """Record that the next iteration starts the prefills of these requests."""

    def prompt_completes(self, request_id: str, computed: int, blocks: Sequence[int]) -> bool:
        """Return whether a request to hand off has its whole prompt `computed`; if so, record its `blocks`."""

    def layer_computed(self, request_ids: Sequence[str], layer: int) -> None:
        """Record that vLLM has computed this layer for these requests, or has queued the computation on the device."""

    def holds_blocks(self, request_id: str) -> bool:
        """Return whether the blocks of a finished request must still be sent. If so, vLLM must not free them yet."""

    def is_sending(self) -> bool:
        """Return whether blocks of finished requests are being sent."""

    def settle(self) -> SettledTransfers:
        """Return the transfers that have ended since the previous call."""


BRIDGES: dict[str, ConnectorBridge] = {}  # bridges of this process, by the name in the configuration of connectors
