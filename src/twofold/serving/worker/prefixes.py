"""Where the beginnings of prompts come from, beside the memory that the engine computes on."""

from collections.abc import Callable, Sequence

from twofold.batch import Batch
from twofold.request import BlockKey
from twofold.serving.messages import StoreFetch
from twofold.serving.worker.layer_wise import LayerWise

Queue = Callable[[], None]  # what queues a prompt


class Prefixes:
    """Nowhere: every prompt is queued at once. All is called with the worker's lock held, but `start`."""

    def start(self) -> None:
        """The worker is ready for prompts."""

    def bring(
        self,
        request_id: str,  # noqa: ARG002  (nothing is known)
        keys: Sequence[BlockKey],  # noqa: ARG002
        queue: Queue,
        fetch: StoreFetch | None = None,  # noqa: ARG002
    ) -> None:
        """Queue a prompt, whose full blocks these are, when it is sure what can be had of it.

        `fetch` says where more of it is to be had than on this host.
        """
        queue()

    def begin(self, batch: Batch) -> LayerWise | None:  # noqa: ARG002  (as above)
        """A batch is about to run: what there is to be done for its prompts with each layer."""
        return None
