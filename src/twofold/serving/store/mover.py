"""The thread of a store that reads and writes its disk, so that questions do not wait for it."""

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import NamedTuple

from twofold.serving.store.disk import DiskBlocks
from twofold.serving.store.events import EventQueue
from twofold.serving.store.memory import SlotMemory
from twofold.serving.store.moves import Forget, Move, Read, Spare, Write


class Moved(NamedTuple):
    """What came of a move: the checksum of the block that was written or read, None if it could not be."""

    move: Write | Read
    checksum: int | None


class Mover:
    """Does moves one after the other, between `disk` and `memory`, whose slots have room for the disk's blocks.

    `fileno` is readable while there is something to `take`.
    """

    def __init__(self, disk: DiskBlocks, memory: SlotMemory) -> None:
        self._disk, self._memory = disk, memory
        self._moves: SimpleQueue[Move | None] = SimpleQueue()
        self._moved: EventQueue[Moved] = EventQueue()
        self._thread = threading.Thread(target=self._run, name="store-disk", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._moved.fileno()

    def begin(self, moves: list[Move]) -> None:
        """Queue moves; safe from any thread."""
        for move in moves:
            self._moves.put(move)

    def take(self) -> Iterator[Moved]:
        """What has been done since this was asked last."""
        return self._moved.drain()

    def close(self) -> None:
        """End when all that was begun is done."""
        self._moves.put(None)
        self._thread.join()
        self._moved.close()

    def _run(self) -> None:
        while (move := self._moves.get()) is not None:
            match move:
                case Write():
                    block = self._memory.slot(move.slot)
                    written = self._disk.write(move.key, move.position, block, move.checksum)
                    if move.spare:
                        self._disk.spare(move.key)
                    self._moved.put(Moved(move, move.checksum if written else None))
                case Read():
                    self._moved.put(Moved(move, self._disk.read(move.key, self._memory.slot(move.slot))))
                case Spare(key=key):
                    self._disk.spare(key)
                case Forget(key=key):
                    self._disk.remove(key)
