"""Which layers of an iteration are complete, where several ranks compute parts of them."""

import threading

from twofold.engine.base import OnLayer


class LayerProgress:
    """Calls `on_layer` for each layer once all `shards` that hold a part of it have computed theirs, in order.

    Its methods may be called from any thread.
    """

    def __init__(self, num_layers: int, shards: int, on_layer: OnLayer) -> None:
        self._shards = shards
        self._on_layer = on_layer
        self._computed = [0] * num_layers
        self._complete = 0
        self._lock = threading.Lock()

    def computed(self, layer: int) -> None:
        """One rank has the KV of its part of this layer."""
        with self._lock:
            self._computed[layer] += 1
            while self._complete < len(self._computed) and self._computed[self._complete] == self._shards:
                self._announce()

    def finish(self) -> None:
        """The iteration is over, so all layers are complete, also those whose ranks are yet to be heard."""
        with self._lock:
            while self._complete < len(self._computed):
                self._announce()

    def _announce(self) -> None:
        self._on_layer(self._complete)
        self._complete += 1
