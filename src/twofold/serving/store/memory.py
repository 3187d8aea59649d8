"""The slot memory of a store, mapped by its clients."""

from twofold.transport.memory import SharedMemory


class SlotMemory:
    """`count` slots of `block_bytes` bytes each in shared memory.

    The mapping keeps the memory alive: clients can read held slots after the store has died.
    """

    def __init__(self, memory: SharedMemory, count: int, block_bytes: int) -> None:
        self.count, self.block_bytes = count, block_bytes
        self.address = memory.address
        self._memory = memory
        self.bytes = memory.view()

    @classmethod
    def create(cls, name: str, count: int, block_bytes: int) -> "SlotMemory":
        """Reserve the memory. Raises ConfigurationError if the machine has too little."""
        return cls(SharedMemory.create(name, count * block_bytes, "--kv-store-dram"), count, block_bytes)

    @classmethod
    def open(cls, address: str, count: int, block_bytes: int) -> "SlotMemory":
        """Map the memory of another process. Raises ConfigurationError if it is gone."""
        return cls(SharedMemory.open(address, count * block_bytes), count, block_bytes)

    def slot(self, slot: int) -> memoryview:
        """The bytes of one slot."""
        return self.bytes[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def close(self) -> None:
        """Close the file descriptor. The mapping ends with its last view."""
        self._memory.close()
