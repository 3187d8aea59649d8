"""Interface between vLLM's KV connector and the worker in which vLLM runs.

vLLM creates two connectors from a class name, one for its scheduler and one for its model runner, and passes them only
its configuration. Both are in the worker's process, so they can look up the worker's bridge in `BRIDGES`.
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
    """Ids of requests whose transfer has ended.

    vLLM may now free the blocks of the requests in `sent`, and may use or free the blocks of the requests in
    `received`.
    """

    sent: set[str]
    received: set[str]


class ConnectorBridge(Protocol):
    """Interface of the worker for vLLM's KV connector. All methods are called on the thread that runs vLLM."""

    def place_cache(self, layout: KvLayout, num_blocks: int) -> torch.Tensor:
        """Return memory for the KV cache that peers can access, as a uint8 tensor [bytes of the KV pool]."""

    def is_remote(self, request_id: str) -> bool:
        """Return whether a peer computes the KV of this request's prompt."""

    def allocated(self, request_id: str, blocks: Sequence[int]) -> None:
        """Record that vLLM has allocated blocks for a prompt whose KV a peer computes.

        The peer may now write to these blocks.
        """

    def prefills_start(self, request_ids: Sequence[str]) -> None:
        """Record that the next iteration starts the prefills of these requests."""

    def prompt_completes(self, request_id: str, computed: int, blocks: Sequence[int]) -> bool:
        """Return whether `computed` tokens complete the prompt of a request to hand off.

        If so, record the request's `blocks`.
        """

    def layer_computed(self, request_ids: Sequence[str], layer: int) -> None:
        """Record that vLLM has computed this layer for these requests, or has queued the computation on the device."""

    def holds_blocks(self, request_id: str) -> bool:
        """Return whether the blocks of a finished request must still be sent, so that vLLM must not free them yet."""

    def is_sending(self) -> bool:
        """Return whether blocks of finished requests are being sent."""

    def settle(self) -> SettledTransfers:
        """Return the transfers that have ended since the previous call."""


BRIDGES: dict[str, ConnectorBridge] = {}  # bridges of this process, by the name in the configuration of connectors
