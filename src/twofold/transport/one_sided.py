"""One-sided writes and reads of a peer's cache."""

import math
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from twofold.engine.base import KvLayout
from twofold.engine.torch.pool import block_runs
from twofold.errors import InstanceLostError, StaleEpochError, TwofoldError

LIFE_BYTES = 64  # 8 bytes for the epoch, and 8 bytes for reading a peer's epoch
CONNECT_S = 10.0

Operation = Literal["WRITE", "READ"]


class Pieces(NamedTuple):
    """Memory ranges of one process, as rows (address, bytes), on GPU `device` or, if that is None, on the host."""

    rows: npt.NDArray[np.uint64]
    device: int | None


class TransferEngine(Protocol):
    """Interface of a library that copies data between the memory of two processes. Methods are thread-safe."""

    def move(
        self, operation: Operation, local: Pieces, remote: Pieces, peer: str, cancelled: Callable[[], bool]
    ) -> None:
        """Copy local memory ranges to the peer's ranges (`WRITE`), or the peer's to the local ones (`READ`).

        Raises InstanceLostError if the peer is unreachable or `cancelled` returns true.
        """

    def forget(self, peer: str) -> None:
        """Drop the connection to a peer."""


class CacheMemory:
    """Memory addresses of an instance's KV cache, for one-sided transfers.

    The KV blocks start at `base`. The epoch number, which changes when the instance restarts, is at `life`. A
    buffer for link measurements is at `scratch`.
    """

    def __init__(
        self, layout: KvLayout, num_blocks: int, *, base: int, life: int, scratch: int, device: int | None = None
    ) -> None:
        self.layout, self.life, self.scratch, self.device = layout, life, scratch, device
        # (address, bytes per block) of each layer's keys and values, if stored separately.
        self._parts: list[list[tuple[int, int]]] = []
        address = base
        for layer in layout.layers:
            parts = []
            for dim in (layer.key_dim, layer.value_dim):
                row = layout.block_size * layer.kv_heads * dim * layout.itemsize
                if row:
                    parts.append((address, row))
                address += num_blocks * row
            self._parts.append(parts)

    def pieces(self, layers: range, starts: Sequence[int], counts: Sequence[int]) -> Pieces:
        """Return the memory of layers for ranges of blocks, the k-th of `counts[k]` blocks from `starts[k]` on."""
        parts = np.array(list(chain.from_iterable(self._parts[layers.start : layers.stop])), dtype=np.uint64)
        rows = np.empty((len(parts), len(starts), 2), dtype=np.uint64)
        rows[:, :, 0] = parts[:, :1] + parts[:, 1:] * np.array(starts, dtype=np.uint64)
        rows[:, :, 1] = parts[:, 1:] * np.array(counts, dtype=np.uint64)
        return Pieces(rows.reshape(-1, 2), self.device)

    def piece(self, address: int, nbytes: int) -> Pieces:
        return Pieces(np.array([(address, nbytes)], dtype=np.uint64), self.device)


class OneSidedConnection:
    """Connection for one-sided access (such as RDMA) to a peer's KV cache, valid until the peer restarts.

    Each write first calls `ready` with the layers and local blocks to write, unless `ready` is None. `ready`
    copies the blocks to registered memory, if they are not there yet.
    """

    def __init__(
        self,
        mover: TransferEngine,
        name: str,
        local: CacheMemory,
        remote: CacheMemory,
        ready: Callable[[range, Sequence[int]], None] | None = None,
    ) -> None:
        self._mover, self._name = mover, name
        self._local, self._remote = local, remote
        self._ready = ready
        self._closed = False

    def write(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        if not source_blocks:
            return 0
        if self._ready is not None:  # copies the blocks to registered memory
            self._ready(layers, source_blocks)
        sources, targets, counts = zip(*block_runs(source_blocks, target_blocks), strict=True)
        self._move("WRITE", self._local.pieces(layers, sources, counts), self._remote.pieces(layers, targets, counts))
        return self._local.layout.bytes_of(layers, len(source_blocks))

    def read(self, layers: range, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> int:
        if not source_blocks:
            return 0
        sources, targets, counts = zip(*block_runs(source_blocks, target_blocks), strict=True)
        self._move("READ", self._local.pieces(layers, targets, counts), self._remote.pieces(layers, sources, counts))
        return self._local.layout.bytes_of(layers, len(source_blocks))

    def probe(self, nbytes: int) -> None:
        local, remote = self._local, self._remote
        self._move("WRITE", local.piece(local.scratch, nbytes), remote.piece(remote.scratch, nbytes))

    def greet(self, epoch: int, life_word: torch.Tensor) -> None:
        """Raise StaleEpochError if the peer is in another epoch, and InstanceLostError if it does not respond."""
        local, remote = self._local, self._remote
        deadline = time.monotonic() + CONNECT_S
        answer = local.piece(local.life + 8, 8)
        try:
            self._move("READ", answer, remote.piece(remote.life, 8), deadline)
            if (found := int(life_word[1])) != epoch:
                raise StaleEpochError(f"epoch {epoch} of {self._name} is over: its epoch is {found}")
        except TwofoldError:
            self.close()
            raise

    def close(self) -> None:
        self._closed = True
        self._mover.forget(self._name)

    def _move(self, operation: Operation, local: Pieces, remote: Pieces, deadline: float = math.inf) -> None:
        if self._closed:
            raise InstanceLostError(f"{self._name} was lost")
        self._mover.move(operation, local, remote, self._name, lambda: self._closed or time.monotonic() > deadline)


def pause(checks: int, waited_s: float) -> None:
    """Sleep for up to 1 ms between two checks of a transfer."""
    time.sleep(0 if checks < 4 else min(waited_s / 16, 0.001))
