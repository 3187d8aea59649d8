"""What an iteration does layer by layer for its prompts, while it computes (Mooncake section 5.2).

load      layer 0   layer 1   layer 2  …
compute             layer 0   layer 1   layer 2  …
store                         layer 0   layer 1   layer 2  …

Where the beginnings of prompts come from, beside the memory that the engine computes on.
"""

import threading
from collections.abc import Callable, Sequence

from twofold.batch import Batch
from twofold.request import BlockKey
from twofold.serving.messages import StoreFetch


class ReadyLayers:
    """The layers of something, which become ready one after the other, for those who wait for them."""

    def __init__(self) -> None:
        self._count = 0
        self._given_up = False
        self._changed = threading.Condition()

    def ready(self, layer: int) -> None:
        """This one is, and so are all before it."""
        with self._changed:
            self._count = layer + 1
            self._changed.notify_all()

    def give_up(self) -> None:
        """No more of them will be."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def wait(self, layer: int) -> bool:
        """Wait until this one is ready; False if it never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > layer or self._given_up)
            return self._count > layer


class LayerSync:
    """Waits for the `loads` of an iteration's blocks, and tells those who wait for what it has `computed`."""

    def __init__(self, num_layers: int, loads: Sequence[ReadyLayers], computed: ReadyLayers | None) -> None:
        self._num_layers, self._loads, self._computed = num_layers, loads, computed

    def wait_for(self, layer: int) -> None:
        """Wait until all is there that the iteration reads of this layer, and does not compute."""
        for load in self._loads:
            load.wait(layer)

    def computed(self, layer: int) -> None:
        """All that the iteration computes of this layer is there."""
        if self._computed is not None:
            self._computed.ready(layer)

    def wait_for_loads(self) -> None:
        """Wait for all layers."""
        for load in self._loads:
            load.wait(self._num_layers - 1)

    def give_up(self) -> None:
        """The iteration failed."""
        if self._computed is not None:
            self._computed.give_up()


Queue = Callable[[], None]  # what queues a prompt


class PrefixSource:
    """Nowhere: every prompt is queued at once. All is called with the worker's lock held, but `start`."""

    def start(self) -> None:
        """The worker is ready for prompts."""

    def bring(
        self,
        request_id: str,
        keys: Sequence[BlockKey],
        queue: Queue,
        fetch: StoreFetch | None = None,
    ) -> None:
        """Queue a prompt, whose full blocks these are, when it is sure what can be had of it.

        `fetch` says where more of it is to be had than on this host.
        """
        queue()

    def begin(self, batch: Batch) -> LayerSync | None:
        """A batch is about to run: what there is to be done for its prompts with each layer."""
        return None
