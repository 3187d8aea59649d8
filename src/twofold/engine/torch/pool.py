"""The paged KV cache of one instance, copies between KV caches, and synchronization with an accelerator."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twofold.engine.base import KvLayout

# With fewer blocks per contiguous run, on average, a gather and a scatter are as fast as a copy per run, and take the
# GIL a few times instead of hundreds. (94 blocks of 16 KiB take 0.5 ms in one run, 0.7 ms in runs of four and 1.0 ms
# scattered.)
_SHORT_RUN = 2


class KvPool:
    """A KV cache of `num_blocks` blocks, in the tensor `memory` or in new memory on `device`."""

    def __init__(
        self, layout: KvLayout, num_blocks: int, memory: Tensor | None = None, device: torch.device | str = "cpu"
    ) -> None:
        nbytes = layout.pool_bytes(num_blocks)
        # `memory` may be shared with other processes, and is never copied.
        if memory is None:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        elif memory.dtype != torch.uint8 or memory.dim() != 1 or memory.numel() < nbytes:
            raise ValueError(f"a pool of {num_blocks} blocks needs {nbytes} bytes as a 1-D uint8 tensor")
        self.layout = layout
        self.layers = range(len(layout.layers))
        self.num_blocks = num_blocks
        self.device = memory.device
        self.memory = memory
        self._parts = _split(layout, num_blocks, memory)
        cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device) if cuda else None  # type: ignore[no-untyped-call]

    def keys(self, layer: int) -> Tensor:
        """Return the keys of a layer, in the shape and dtype that the layout states."""
        return self._parts[layer][0]

    def values(self, layer: int) -> Tensor:
        """Return the values of a layer, in the shape and dtype that the layout states."""
        return self._parts[layer][1]

    def index(self, numbers: Sequence[int]) -> Tensor:
        """Return `numbers` as an int64 tensor on the pool's device."""
        return torch.tensor(numbers, dtype=torch.long).to(self.device, non_blocking=True)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Run the KV copies in a `with` block on a separate CUDA stream, then wait for the copies."""
        # For threads other than the engine's, so that copies and iterations do not wait for each other.
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def block_rows(self, layer: int) -> list[Tensor]:
        """Return a layer's keys, and its values if there are any, as uint8 tensors [num_blocks, bytes per block]."""
        return [part.view(self.num_blocks, -1).view(torch.uint8) for part in self._parts[layer] if part.numel()]


def copy_blocks(
    source: KvPool, layers: range, source_ids: Sequence[int], target: KvPool, target_ids: Sequence[int]
) -> None:
    """Copy some layers of KV blocks from the pool `source` to the pool `target`.

    The blocks have the ids `source_ids` in the source and `target_ids` in the target. The two pools must have
    equal KV layouts.
    """
    # Copies between host and accelerator are complete at the end of `KvPool.copying` or of the iteration.
    rows = [zip(source.block_rows(layer), target.block_rows(layer), strict=True) for layer in layers]
    _copy_parts(list(chain.from_iterable(rows)), source_ids, target_ids)


class PoolHeads(NamedTuple):
    """A range of KV heads in one layer and in some blocks of a pool."""

    pool: KvPool
    layer: int
    heads: range
    blocks: Sequence[int]

    @property
    def all_heads(self) -> bool:
        """Whether the range has all heads of the layer."""
        return len(self.heads) == self.pool.layout.layers[self.layer].kv_heads

    def parts(self) -> list[Tensor]:
        """Return the heads' keys and values in all blocks of the pool."""
        both, dimension = (self.pool.keys(self.layer), self.pool.values(self.layer)), 2 - self.pool.layout.heads_first
        return [part.narrow(dimension, self.heads.start, len(self.heads)) for part in both]


def copy_heads(source: PoolHeads, target: PoolHeads) -> int:
    """Copy KV heads from the blocks of `source` to the blocks of `target`; return the number of bytes."""
    if source.all_heads and target.all_heads:
        parts = zip(source.pool.block_rows(source.layer), target.pool.block_rows(target.layer), strict=True)
    else:
        parts = zip(source.parts(), target.parts(), strict=True)
    _copy_parts(list(parts), source.blocks, target.blocks)
    return len(source.blocks) * len(source.heads) * source.pool.layout.head_bytes_per_block(source.layer)


def _copy_parts(parts: Sequence[tuple[Tensor, Tensor]], source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
    """Copy rows, which are blocks, from the first to the second tensor of each pair."""
    if not source_ids:
        return
    runs = block_runs(source_ids, target_ids)
    if len(runs) == 1 or len(source_ids) >= _SHORT_RUN * len(runs):
        for from_part, to_part in parts:
            for start, to_start, count in runs:
                to_part.narrow(0, to_start, count).copy_(from_part.narrow(0, start, count), non_blocking=True)
        return
    for from_part, to_part in parts:
        take = torch.tensor(source_ids, device=from_part.device)
        put = torch.tensor(target_ids, device=to_part.device)
        rows = _as_words(from_part).index_select(0, take).to(to_part.device)
        _as_words(to_part).index_copy_(0, put, rows)


def block_runs(source_ids: Sequence[int], target_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Pair source and target blocks by position, and group pairs with consecutive ids into runs.

    Return (first source id, first target id, number of pairs) for each run.
    """
    pairs = list(zip(source_ids, target_ids, strict=True))
    starts = [0] + [i for i, ((a, b), (c, d)) in enumerate(pairwise(pairs), 1) if (c, d) != (a + 1, b + 1)]
    ends = [*starts[1:], len(pairs)]
    return [(*pairs[start], end - start) for start, end in zip(starts, ends, strict=True)]


def _split(layout: KvLayout, num_blocks: int, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return views of the keys and the values of each layer in the memory of a pool."""
    dtype: torch.dtype = getattr(torch, layout.dtype)
    numbers = memory[: layout.pool_bytes(num_blocks)].view(dtype)
    parts, offset = [], 0
    for layer in layout.layers:
        views = []
        for dim in (layer.key_dim, layer.value_dim):
            rows = (layer.kv_heads, layout.block_size) if layout.heads_first else (layout.block_size, layer.kv_heads)
            count = num_blocks * layout.block_size * layer.kv_heads * dim
            views.append(numbers[offset : offset + count].view(num_blocks, *rows, dim))
            offset += count
        parts.append((views[0], views[1]))
    return parts


def _as_words(part: Tensor) -> Tensor:
    """For faster indexing, view rows of bytes as int64 if the row length is a multiple of 8."""
    return part if part.dtype != torch.uint8 or part.shape[1] % torch.int64.itemsize else part.view(torch.int64)


class LayerNotifier:
    """Runs each callback once the device has completed the work queued before the callback."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: queue.Queue[tuple[torch.cuda.Event, Callable[[], None]]] = queue.Queue()
        self._error: Exception | None = None
        if device.type == "cuda":
            threading.Thread(target=self._run, name="announcer", daemon=True).start()

    def after(self, call: Callable[[], None]) -> None:
        """Run `call` once the device has completed all work that is queued so far."""
        if self._device.type != "cuda":
            call()
            return
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._waiting.put((event, call))

    def finish(self) -> None:
        """Wait for the queued work of the device and for all callbacks. Raises the exception of a failed callback."""
        if self._device.type != "cuda":
            return
        torch.cuda.current_stream(self._device).synchronize()
        self._waiting.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            event, call = self._waiting.get()
            try:
                event.synchronize()
                call()
            except Exception as error:  # noqa: BLE001  (raised by `finish`)
                self._error = error
            finally:
                self._waiting.task_done()


class PinnedMemory:
    """Host memory that is pinned until `close`, for fast copies to and from an accelerator."""

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        self._address, self._device = memory.data_ptr(), device
        # On a CPU, or if the registration fails, the memory is used unpinned.
        self.pinned = device.type == "cuda" and self._register(memory.numel())

    def _register(self, nbytes: int) -> bool:
        with torch.cuda.device(self._device):
            if int(_runtime().cudaHostRegister(self._address, nbytes, 0)) == 0:
                return True
            # Clear the error, because otherwise the next call to the device would raise it.
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)
            return False

    def close(self) -> None:
        """Unpin the memory. Call this before unmapping the memory."""
        if self.pinned:
            with torch.cuda.device(self._device):
                _runtime().cudaHostUnregister(self._address)  # once unmapped, the address may be mapped again
            self.pinned = False


def _runtime() -> Any:  # noqa: ANN401  (torch does not type it)
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
