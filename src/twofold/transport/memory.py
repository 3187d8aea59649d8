"""Memory that several processes map, and that the kernel frees when the last of them is gone."""

import ctypes
import mmap
import os

from twofold.errors import ConfigurationError

# The module mmap cannot be told where.
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_mmap.restype = ctypes.c_void_p
_MAP_FAILED = ctypes.c_void_p(-1).value


class SharedMemory:
    """`nbytes` of memory shared through an anonymous file (memfd).

    It has no name in the file system: peers open it as /proc/PID/fd/FD, and nothing is left behind however
    its processes end. A restarted process has new memory, so late writes of a peer go to the old one.
    """

    def __init__(self, fd: int, nbytes: int, address: str) -> None:
        self._map = mmap.mmap(fd, nbytes)
        self._fd = fd
        self.nbytes = nbytes
        self.address = address

    @classmethod
    def create(cls, name: str, nbytes: int, flag: str = "--kv-cache-memory-bytes") -> "SharedMemory":
        """Reserve `nbytes`, as `flag` asks for; raises ConfigurationError when the machine cannot give them."""
        fd = os.memfd_create(f"twofold-{name}")
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            os.close(fd)
            raise ConfigurationError(
                f"{nbytes / 2**20:,.0f} MiB of shared memory for {name} cannot be had "
                f"({error.strerror}): lower {flag}"
            ) from error
        return cls(fd, nbytes, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def open(cls, address: str, nbytes: int) -> "SharedMemory":
        """Map what another process created; raises ConfigurationError when it is not there or of another size."""
        try:
            fd = os.open(address, os.O_RDWR)
        except OSError as error:
            raise ConfigurationError(f"shared memory {address} cannot be opened: {error.strerror}") from error
        size = os.fstat(fd).st_size
        if size != nbytes:
            os.close(fd)
            raise ConfigurationError(f"shared memory {address} has {size} bytes where {nbytes} were expected")
        return cls(fd, nbytes, address)

    def view(self) -> memoryview:
        """All of it as bytes, writable."""
        return memoryview(self._map)

    def map_again(self, address: int) -> int:
        """Map it once more, until the process ends, at this address if that is free; returns where it is.

        Raises ConfigurationError where the process has no room for it.
        """
        mapped = _mmap(address, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, self._fd, 0)
        if mapped == _MAP_FAILED:
            reason = os.strerror(ctypes.get_errno())
            raise ConfigurationError(
                f"{self.nbytes / 2**20:,.0f} MiB cannot be mapped a second time: {reason}"
            )
        return int(mapped)

    def close(self) -> None:
        """Give up this process's file descriptor; the mapping goes with the last view of it."""
        os.close(self._fd)
