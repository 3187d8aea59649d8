"""The memory of a store: slots for blocks, one after the other, that its clients map."""

from twofold.transport.memory import SharedMemory


class SlotMemory:
    """`count` slots of `block_bytes` bytes each in shared memory.

    What maps it keeps it: a client reads on in what it holds when the store that made it is dead.
    """

    def __init__(self, memory: SharedMemory, count: int, block_bytes: int) -> None:
        self.count, self.block_bytes = count, block_bytes
        self.address = memory.address
        self._memory = memory
        self.bytes = memory.view()

    @classmethod
    def create(cls, name: str, count: int, block_bytes: int) -> "SlotMemory":
        """Raises ConfigurationError where the machine cannot give so much."""
        return cls(SharedMemory.create(name, count * block_bytes, "--kv-store-dram"), count, block_bytes)

    @classmethod
    def open(cls, address: str, count: int, block_bytes: int) -> "SlotMemory":
        """What another process created; raises ConfigurationError where it is there no more."""
        return cls(SharedMemory.open(address, count * block_bytes), count, block_bytes)

    def slot(self, slot: int) -> memoryview:
        """The bytes of one slot."""
        return self.bytes[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def close(self) -> None:
        """Give up the file descriptor; the mapping goes with the last that looks at it."""
        self._memory.close()
