"""vLLM's own account of its blocks.

What ties a vLLM engine to the worker around it: its KV connector asks and tells this, on the engine's own thread.

vLLM makes the connector itself, from a class name, twice (for its scheduler and for its model runner), and hands
neither of them anything but its configuration. All live in one process here, so they find their
`ConnectorBridge` by a name.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from twofold.engine.base import KvLayout


class VllmBlockCounts(NamedTuple):
    """How many there are for requests, and how many of them nobody holds, whatever is cached in them."""

    total: int
    free: int


class SettledTransfers(NamedTuple):
    """Requests whose blocks vLLM may free, because they were sent, and those that may run, or be freed, here."""

    sent: set[str]
    received: set[str]


class ConnectorBridge(Protocol):
    """The worker, as far as the engine's connector knows it."""

    def place(self, layout: KvLayout, num_blocks: int) -> torch.Tensor:
        """The memory [bytes of the pool] of uint8 in which the KV cache is to lie, so that peers reach it."""
        ...

    def comes(self, request_id: str) -> bool:
        """Whether the KV of this prompt is computed by a peer, and not here."""
        ...

    def allocated(self, request_id: str, blocks: Sequence[int]) -> None:
        """There is room for the KV of a prompt that a peer computes: it may be written."""
        ...

    def starting(self, request_ids: Sequence[str]) -> None:
        """These prompts start with the iteration that is about to run."""
        ...

    def completing(self, request_id: str, computed: int, blocks: Sequence[int]) -> bool:
        """The iteration that is about to run computes the KV of a request up to so many tokens, in these blocks.

        True where that completes its prompt and each layer of it is to be followed.
        """
        ...

    def computed(self, request_ids: Sequence[str], layer: int) -> None:
        """The KV of this layer is complete for these requests, and later layers are still to come."""
        ...

    def holds(self, request_id: str) -> bool:
        """The request is over for vLLM: whether its blocks are still read, so that they may not be free yet."""
        ...

    def sending(self) -> bool:
        """Whether blocks will become free without anything being run, because they were sent."""
        ...

    def settle(self) -> SettledTransfers:
        """What has become of hand-offs since this was asked last; each request is named once."""
        ...


_known: dict[str, ConnectorBridge] = {}


def register_bridge(name: str, ties: ConnectorBridge) -> None:
    """Let connectors that are configured with this name find these."""
    _known[name] = ties


def find_bridge(name: str) -> ConnectorBridge:
    """Those of this name; KeyError where there are none: the connector is of use within a worker only."""
    return _known[name]
