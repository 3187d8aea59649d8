"""The slot memory of a store, mapped by its clients."""

from twofold.transport.memory import SharedMemory


class SlotMemory:
    """`count` slots of `block_bytes` bytes each in shared memory.

    The mapping keeps the memory alive: clients can read held slots after the store has died.
    """

    def __init__(self, memory: SharedMemory, block_bytes: int) -> None:
        self.count, self.block_bytes, self.address = memory.nbytes // block_bytes, block_bytes, memory.address
        self._memory = memory
        self.bytes = memory.view()

    def slot(self, slot: int) -> memoryview:
        """The bytes of one slot."""
        return self.bytes[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def close(self) -> None:
        """Close the file descriptor. The mapping ends with its last view."""
        self._memory.close()
