"""Sources of cached prompt prefixes beside the engine's memory, synchronized by layer (Mooncake, section 5.2).

load      layer 0   layer 1   layer 2  …
compute             layer 0   layer 1   layer 2  …
store                         layer 0   layer 1   layer 2  …
"""

import threading
from collections.abc import Callable, Sequence

from twofold.batch import Batch
from twofold.request import BlockKey
from twofold.serving.messages import StoreFetch


class ReadyLayers:
    """Counts the layers of a load, or of an iteration, that are complete. Other threads can wait for one."""

    def __init__(self) -> None:
        self._count = 0
        self._given_up = False
        self._changed = threading.Condition()

    def ready(self, layer: int) -> None:
        """Record that this layer and all before it are complete."""
        with self._changed:
            self._count = layer + 1
            self._changed.notify_all()

    def give_up(self) -> None:
        """Record that no more layers follow."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def wait(self, layer: int) -> bool:
        """Wait until this layer is complete; False if it never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > layer or self._given_up)
            return self._count > layer


class LayerSync:
    """Synchronizes an iteration with the `loads` of its blocks, and a store with its `computed` layers."""

    def __init__(self, num_layers: int, loads: Sequence[ReadyLayers], computed: ReadyLayers | None) -> None:
        self._num_layers, self._loads, self._computed = num_layers, loads, computed

    def wait_for(self, layer: int) -> None:
        """Wait until the cached KV of this layer is loaded."""
        for load in self._loads:
            load.wait(layer)

    def computed(self, layer: int) -> None:
        """Record that the iteration has computed this layer."""
        if self._computed is not None:
            self._computed.ready(layer)

    def wait_for_loads(self) -> None:
        """Wait for all layers of all loads."""
        for load in self._loads:
            load.wait(self._num_layers - 1)

    def give_up(self) -> None:
        """Record that the iteration has failed."""
        if self._computed is not None:
            self._computed.give_up()


Queue = Callable[[], None]  # queues a prompt


class PrefixSource:
    """Base class: queues every prompt at once. The caller of all methods except `start` holds the worker's lock."""

    def start(self) -> None:
        """Start the source's threads, before the first prompt."""

    def bring(self, request_id: str, keys: Sequence[BlockKey], queue: Queue, fetch: StoreFetch | None = None) -> None:
        """Queue a prompt with these full blocks, after its cached prefix was found.

        `fetch` names another host that caches more of it.
        """
        queue()

    def begin(self, batch: Batch) -> LayerSync | None:
        """Return the layer synchronization of a batch about to run, if it needs any."""
        return None
