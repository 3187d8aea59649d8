"""Shared memory of a KV store, divided into slots that clients read and write directly."""

from twofold.transport.memory import SharedMemory


class SlotMemory:
    """Shared memory of a KV store, divided into slots of `block_bytes` bytes."""

    def __init__(self, memory: SharedMemory, block_bytes: int) -> None:
        self.count, self.block_bytes, self.address = memory.nbytes // block_bytes, block_bytes, memory.address
        self._memory = memory
        self.bytes = memory.view()

    def slot(self, slot: int) -> memoryview:
        """Return a view of the bytes in one slot."""
        return self.bytes[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def close(self) -> None:
        """Close the file descriptor of the memory."""
        self._memory.close()
