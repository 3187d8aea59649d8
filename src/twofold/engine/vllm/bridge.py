"""The connection between a vLLM engine and the worker around it.

vLLM creates the KV connector itself, from a class name, once for its scheduler and once for its model runner,
and passes only its configuration. Both are in the worker's process, where they find the worker's bridge by a
name.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from twofold.engine.base import KvLayout


class VllmBlockCounts(NamedTuple):
    """Size of vLLM's block pool. `free` includes cached blocks that no request uses."""

    total: int
    free: int


class SettledTransfers(NamedTuple):
    """Requests whose blocks were sent, so that vLLM may free them, and requests whose KV was received."""

    sent: set[str]
    received: set[str]


class ConnectorBridge(Protocol):
    """The worker's side of the KV connector. All methods are called on the thread that runs vLLM."""

    def place_cache(self, layout: KvLayout, num_blocks: int) -> torch.Tensor:
        """Return the memory for the KV cache [bytes of the pool] of uint8, which peers can access."""

    def is_remote(self, request_id: str) -> bool:
        """Whether a peer computes the KV of this prompt."""

    def allocated(self, request_id: str, blocks: Sequence[int]) -> None:
        """Blocks for the KV of a remote prompt are allocated and may be written."""

    def prefills_start(self, request_ids: Sequence[str]) -> None:
        """The next iteration starts these prompts."""

    def prompt_completes(self, request_id: str, computed: int, blocks: Sequence[int]) -> bool:
        """Whether the next iteration, with KV for `computed` tokens, completes a prompt that is handed off."""

    def layer_computed(self, request_ids: Sequence[str], layer: int) -> None:
        """The KV of this layer is computed for these requests."""

    def holds_blocks(self, request_id: str) -> bool:
        """Whether the blocks of a finished request are still to be sent, and must not be freed."""

    def is_sending(self) -> bool:
        """Whether blocks of finished requests are being sent."""

    def settle(self) -> SettledTransfers:
        """Return the transfers that have ended since the last call."""


BRIDGES: dict[str, ConnectorBridge] = {}  # of this process, by the name that connectors are configured with
