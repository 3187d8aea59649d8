"""vLLM workers of several ranks: the KV cache of each rank, and layers that all ranks have computed."""

from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection

import msgspec
import torch

from twofold.engine.base import KvLayout
from twofold.engine.rank_link import FirstRankLink, LayerProgress
from twofold.engine.vllm.ranks import LayerComputed
from twofold.errors import ModelError
from twofold.kvcache.sharding import Sharding
from twofold.serving.config import WorkerConfig
from twofold.serving.worker.vllm.loop import MakePool, WorkerBridge
from twofold.transport.base import KvCacheSpec
from twofold.transport.sharded import RankServer
from twofold.transport.shared_memory import SharedMemoryTransport


def rank_cache(spec: WorkerConfig, rank: int, epoch: int, num_layers: int) -> MakePool:
    """Return a function that allocates a rank's KV cache in the layout that vLLM has chosen on that rank."""
    split = spec.split

    def make(own: KvLayout, num_blocks: int) -> SharedMemoryTransport:
        shape = msgspec.structs.replace(own.layers[0], kv_heads=own.layers[0].kv_heads * split.tensor)
        whole = msgspec.structs.replace(own, layers=(shape,) * num_layers)
        if whole.of_rank(split, rank) != own:
            raise ModelError(f"{split} needs a model whose layers have KV of one shape")
        return SharedMemoryTransport(KvCacheSpec(spec.instance, epoch, whole, num_blocks), split, rank)

    return make


class SplitBridge(WorkerBridge):
    """Bridge on rank 0, which reports a layer of a prompt once all tensor shards have computed it."""

    def __init__(self, make: MakePool, split: Sharding, num_layers: int) -> None:
        super().__init__(make)
        self._split, self._num_layers = split, num_layers
        self._progress: dict[tuple[str, ...], LayerProgress] = {}  # by the requests that an iteration prefills

    def report_layer(self, request_ids: Sequence[str], layer: int) -> None:
        key = tuple(request_ids)
        new = LayerProgress(self._num_layers, self._split.tensor, partial(self._complete, key))
        self._progress.setdefault(key, new).computed(layer)  # atomic: the thread that listens to ranks calls it too

    def _complete(self, request_ids: tuple[str, ...], layer: int) -> None:
        if layer == self._num_layers - 1:
            del self._progress[request_ids]
        super().report_layer(request_ids, layer)


class RankBridge(WorkerBridge):
    """Bridge on another rank, which sends computed layers to rank 0, and moves the rank's KV on request."""

    def __init__(self, make: MakePool, first_layer: int, link: FirstRankLink[bytes], memory: Connection) -> None:
        super().__init__(make)
        self._first_layer, self._link, self._memory = first_layer, link, memory

    def place_cache(self, layout: KvLayout, num_blocks: int) -> torch.Tensor:
        placed = super().place_cache(layout, num_blocks)
        RankServer(self.transport, self._memory).start(self._link.heartbeat)
        return placed

    def report_layer(self, request_ids: Sequence[str], layer: int) -> None:
        self._link.send(LayerComputed(request_ids, self._first_layer + layer))
