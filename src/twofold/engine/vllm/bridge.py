"""Interface between vLLM's KV connector and the worker in which vLLM runs.

vLLM creates the connector from a class name, once for its scheduler and once for its model runner, and passes only its
configuration. Both connectors are in the worker's process, where they find the worker's bridge in `BRIDGES`.
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
    """Requests with ended transfers: vLLM may free the blocks of `sent`, and use or free the blocks of `received`."""

    sent: set[str]
    received: set[str]


class ConnectorBridge(Protocol):
    """The worker's side of vLLM's KV connector. All methods are called on the thread that runs vLLM."""

    def place_cache(self, layout: KvLayout, num_blocks: int) -> torch.Tensor:
        """Return memory that peers can access, to hold the KV cache: uint8 [bytes of the pool]."""

    def is_remote(self, request_id: str) -> bool:
        """Return whether a peer computes the KV of this prompt."""

    def allocated(self, request_id: str, blocks: Sequence[int]) -> None:
        """Record that vLLM has allocated blocks for the KV of a remote prompt. The peer may now write them."""

    def prefills_start(self, request_ids: Sequence[str]) -> None:
        """Record that the next iteration starts the prefills of these requests."""

    def prompt_completes(self, request_id: str, computed: int, blocks: Sequence[int]) -> bool:
        """Return whether `computed` tokens complete a prompt with a hand-off; if so, record its `blocks`."""

    def layer_computed(self, request_ids: Sequence[str], layer: int) -> None:
        """Record that vLLM has computed this layer for these requests, or queued it on the device."""

    def holds_blocks(self, request_id: str) -> bool:
        """Return whether the blocks of a finished request are still to be sent, so that vLLM must not free them."""

    def is_sending(self) -> bool:
        """Return whether blocks of finished requests are being sent."""

    def settle(self) -> SettledTransfers:
        """Return the transfers that have ended since the last call."""


BRIDGES: dict[str, ConnectorBridge] = {}  # bridges of this process, by the name in the configuration of connectors
