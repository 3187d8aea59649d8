"""Where the beginnings of prompts come from, beside the memory that the engine computes on."""

from collections.abc import Callable, Sequence

from twofold.request import BlockKey

Queue = Callable[[], None]  # what queues a prompt


class Prefixes:
    """Nowhere: every prompt is queued at once. All is called with the worker's lock held, but `start`."""

    def start(self) -> None:
        """The worker is ready for prompts."""

    def bring(self, request_id: str, keys: Sequence[BlockKey], queue: Queue) -> None:  # noqa: ARG002  (nothing is known)
        """Queue a prompt, whose full blocks these are, when what can be had of it is here."""
        queue()

    def computed(self, keys: Sequence[BlockKey]) -> None:
        """These blocks of a prompt are whole."""
