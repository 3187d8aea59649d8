"""Load and store cached prefixes layer by layer during prefill (Mooncake, section 5.2)."""

import threading
from collections.abc import Callable, Sequence

from twofold.batch import Batch
from twofold.request import BlockKey
from twofold.serving.messages import StoreFetch


class ReadyLayers:
    """Counter of completed layers, which other threads can wait for."""

    def __init__(self) -> None:
        self._count = 0
        self._given_up = False
        self._changed = threading.Condition()

    def ready(self, layer: int) -> None:
        """Record that layer `layer` and all earlier layers are complete."""
        with self._changed:
            self._count = layer + 1
            self._changed.notify_all()

    def give_up(self) -> None:
        """Record that no more layers will be complete."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def wait(self, layer: int) -> bool:
        """Wait until this layer is complete; return False if it will never be complete."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > layer or self._given_up)
            return self._count > layer


class LayerSync:
    """Layer-by-layer synchronization of an iteration with the threads that load and store cached prefixes."""

    def __init__(self, num_layers: int, loads: Sequence[ReadyLayers], computed: ReadyLayers | None) -> None:
        self._num_layers, self._loads, self._computed = num_layers, loads, computed

    def wait_for(self, layer: int) -> None:
        """Wait until the KV of layer `layer` is loaded for all cached prefixes of the iteration."""
        for load in self._loads:
            load.wait(layer)

    def computed(self, layer: int) -> None:
        """Record that the iteration has computed layer `layer`."""
        if self._computed is not None:
            self._computed.ready(layer)

    def wait_for_loads(self) -> None:
        """Wait until all cached prefixes of the iteration are loaded."""
        for load in self._loads:
            load.wait(self._num_layers - 1)

    def give_up(self) -> None:
        """Record that the iteration has failed."""
        if self._computed is not None:
            self._computed.give_up()


Queue = Callable[[], None]  # queues a prompt


class PrefixSource:
    """Source of cached prompt prefixes. This base class provides none."""

    def start(self) -> None:
        """Start the threads of the source. Call this before the first prompt arrives."""

    def bring(self, request_id: str, keys: Sequence[BlockKey], queue: Queue, fetch: StoreFetch | None = None) -> None:
        """Load the cached prefix of a prompt, fetching it from another host if `fetch` is given. Then call `queue`,
        which queues the prompt for prefill. Requires the worker's lock.
        """
        queue()

    def begin(self, batch: Batch) -> LayerSync | None:
        """Return the `LayerSync` that coordinates a batch with the loading and storing of cached KV.

        Return None if the batch neither loads nor stores cached KV. The caller must hold the worker's lock.
        """
        return None
