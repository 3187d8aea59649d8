"""Interface between vLLM's KV connectors and the worker, which run in one process."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from twofold.engine.base import KvLayout


class VllmBlockCounts(NamedTuple):
    """Counts of total and free blocks in vLLM's block pool."""

    total: int
    free: int  # including cached blocks that no request uses


class SettledTransfers(NamedTuple):
    """Ids of requests whose KV transfers have ended."""

    sent: set[str]  # vLLM may now free their blocks
    received: set[str]  # vLLM may now use their blocks


class ConnectorBridge(Protocol):
    """Methods of a worker that vLLM's KV connector calls, on the thread that runs vLLM."""

    def place_cache(self, layout: KvLayout, num_blocks: int) -> torch.Tensor:
        """Return memory for vLLM's KV cache that peers can access, as a uint8 tensor."""

    def is_remote(self, request_id: str) -> bool:
        """Return whether a peer computes the KV of this request's prompt."""

    def allocated(self, request_id: str, blocks: Sequence[int]) -> None:
        """Record that vLLM has allocated blocks for a prompt whose KV a peer computes."""

    def prefills_start(self, request_ids: Sequence[str]) -> None:
        """Record that the next iteration starts the prefills of these requests."""

    def prompt_completes(self, request_id: str, computed: int, blocks: Sequence[int]) -> bool:
        """Return whether the next iteration completes the prompt of a request with a hand-off.

        If so, record the request's KV blocks. `computed` is the number of computed tokens after the iteration.
        """

    # The computation may only be queued on the device yet.
    def layer_computed(self, request_ids: Sequence[str], layer: int) -> None:
        """Record that vLLM has computed the layer `layer` for the requests `request_ids`."""

    def drafts(self, request_id: str) -> list[int]:
        """Return the draft tokens that a peer has computed after the first token of a request."""

    def holds_blocks(self, request_id: str) -> bool:
        """Return whether vLLM must keep the blocks of a finished request, because they must still be sent."""

    def is_sending(self) -> bool:
        """Return whether blocks of finished requests are being sent."""

    def settle(self) -> SettledTransfers:
        """Return the transfers that have ended since the previous call."""


# vLLM passes connectors nothing but its configuration, so they look up the worker's bridge here.
BRIDGES: dict[str, ConnectorBridge] = {}  # bridges of this process, by the name in the configuration of connectors
