"""The wires between the ranks of a split worker: made before its processes are forked, for one life of it."""

import secrets
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple


class Wire(NamedTuple):
    """One end of what runs between the first rank and another: a pipe for iterations, and one for its memory."""

    steps: Connection
    memory: Connection

    def close(self) -> None:
        self.steps.close()
        self.memory.close()


class Wires:
    """Pipes between the first rank and each other, and `store`, a file for all of them to meet at.

    Each process keeps the ends that are its own, so that it notices when the process at the other end is gone.
    """

    def __init__(self, ranks: int, store: str) -> None:
        self.store = f"{store}-{secrets.token_hex(8)}"
        pairs = [(Pipe(), Pipe()) for _ in range(1, ranks)]
        self._firsts = [Wire(steps[0], memory[0]) for steps, memory in pairs]
        self._others = [Wire(steps[1], memory[1]) for steps, memory in pairs]

    def of_first(self) -> Sequence[Wire]:
        """The first rank's ends, by rank from 1; all others are closed in this process."""
        _close(self._others)
        return self._firsts

    def of(self, rank: int) -> Wire:
        """Another rank's ends; all others are closed in this process."""
        _close([*self._firsts, *self._others[: rank - 1], *self._others[rank:]])
        return self._others[rank - 1]

    def close(self) -> None:
        """This process is none of the ranks."""
        _close([*self._firsts, *self._others])


def _close(wires: Sequence[Wire]) -> None:
    for wire in wires:
        wire.close()
