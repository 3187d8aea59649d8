"""Memory shared by several processes."""

import ctypes
import mmap
import os

from twofold.errors import ConfigurationError

# Python's mmap module does not accept an address.
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
_MAP_FAILED = ctypes.c_void_p(-1).value


class SharedMemory:
    """Shared memory in an anonymous file, which is freed when its last process exits."""

    def __init__(self, fd: int, nbytes: int, address: str) -> None:
        self._map = mmap.mmap(fd, nbytes)
        self._fd = fd
        self.nbytes = nbytes
        self.address = address

    @classmethod
    def create(cls, name: str, nbytes: int, flag: str = "--kv-cache-memory-bytes") -> "SharedMemory":
        """Allocate shared memory. Raises ConfigurationError if too little memory is free."""
        # Peers open the memory as /proc/PID/fd/FD, so no file remains after a crash. A restarted process allocates new
        # memory, so late writes of a peer go to the old memory.
        fd = os.memfd_create(f"twofold-{name}")
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            os.close(fd)
            raise ConfigurationError(
                f"cannot reserve {nbytes / 2**20:,.0f} MiB of shared memory for {name} ({error.strerror}): lower {flag}"
            ) from error
        return cls(fd, nbytes, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def open(cls, address: str, nbytes: int) -> "SharedMemory":
        """Map shared memory of another process. Raises ConfigurationError on failure."""
        try:
            fd = os.open(address, os.O_RDWR)
        except OSError as error:
            raise ConfigurationError(f"cannot open shared memory {address}: {error.strerror}") from error
        size = os.fstat(fd).st_size
        if size != nbytes:
            os.close(fd)
            raise ConfigurationError(f"shared memory {address} has {size} bytes, not {nbytes}")
        return cls(fd, nbytes, address)

    def view(self) -> memoryview:
        """Return a writable view of all bytes."""
        return memoryview(self._map)

    def map_again(self, address: int) -> int:
        """Map the memory again, preferably at `address`; return its address. Raises ConfigurationError on failure."""
        mapped = _mmap(address, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, self._fd, 0)
        if mapped == _MAP_FAILED:
            reason = os.strerror(ctypes.get_errno())
            raise ConfigurationError(f"cannot map {self.nbytes / 2**20:,.0f} MiB a second time: {reason}")
        return int(mapped)

    def close(self) -> None:
        """Close the file descriptor. The memory stays mapped."""
        os.close(self._fd)


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
