"""Leased blocks that land beside the engine's pool, because that lies on an accelerator.

Leased blocks of a split worker on accelerators: they land beside the pool of each of its ranks.

Sequences that are swapped out of the pool that an engine computes on, and back.

The parts of a worker whose model is divided among several processes, its ranks.

The parts of workers that run a model with torch.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.loader import LoadedModel, load_model
from twofold.engine.torch.pool import KvPool, copy_all_layers, copy_blocks
from twofold.engine.torch.ranks import RANK_HEARTBEAT_S, RankFollower, SplitEngine
from twofold.engine.torch.split_model import RankGroup, check_split_model, split_model
from twofold.errors import ConfigurationError
from twofold.scheduling.batchers import can_swap
from twofold.scheduling.instance.swap_preemption import BlockCopy
from twofold.security.network import HostNetwork
from twofold.serving.config import ServiceConfig, WorkerConfig
from twofold.serving.launch.memory_plan import MemoryPlan, available_memory, plan_memory
from twofold.serving.launch.model_source import model_fingerprint
from twofold.serving.store.copier import PoolCopier
from twofold.serving.store.server import check_store
from twofold.serving.worker.engines import RankPipes, ReportStage, WorkerParts
from twofold.serving.worker.state import KvLanding
from twofold.transport.pooled import MakeTransport, load_transport
from twofold.transport.sharded import CopyToEngine, OtherRanks, RankServer, ShardedTransport
from twofold.transport.shared_memory import SharedMemoryTransport


class StagedLanding(KvLanding):
    """Brings landed blocks from the memory that peers write into the pool that the engine computes on."""

    def __init__(self, landing_pool: KvPool, engine_pool: KvPool) -> None:
        self._landing_pool = landing_pool
        self._engine_pool = engine_pool
        self._waiting: list[tuple[str, Sequence[int]]] = []

    def landed(self, request_id: str, blocks: Sequence[int]) -> None:
        self._waiting.append((request_id, tuple(blocks)))

    def take(self) -> list[Sequence[int]]:
        waiting, self._waiting = self._waiting, []
        return [blocks for _, blocks in waiting]

    def drop(self, request_id: str) -> None:
        self._waiting = [(rid, blocks) for rid, blocks in self._waiting if rid != request_id]

    def bring(self, block_lists: Sequence[Sequence[int]]) -> None:
        for blocks in block_lists:
            copy_all_layers(self._landing_pool, self._engine_pool, blocks)


class RankedLanding(StagedLanding):
    """Lets the other ranks bring their parts as well; the pools are those of the first."""

    def __init__(self, landing_pool: KvPool, engine_pool: KvPool, ranks: OtherRanks) -> None:
        super().__init__(landing_pool, engine_pool)
        self._ranks = ranks

    def bring(self, block_lists: Sequence[Sequence[int]]) -> None:
        if block_lists:
            self._ranks.ask(CopyToEngine(block_lists))
            super().bring(block_lists)


class PoolSwapSpace:
    """Implements `SwapSpace` with a pool in the memory of the host, which is taken bit by bit, as it is used."""

    def __init__(self, engine_pool: KvPool, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._engine_pool = engine_pool
        self._host_pool = KvPool(engine_pool.layout, num_blocks)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        here, there = self._engine_pool, self._host_pool
        for copy in copies:
            for layer in range(len(here.layout.layers)):
                if copy.out:
                    copy_blocks(here, layer, copy.device_blocks, there, copy.host_blocks)
                else:
                    copy_blocks(there, layer, copy.host_blocks, here, copy.device_blocks)


class TorchRanks:
    """Makes the ranks of the workers that are split, each in its own process, from a model that all have inherited."""

    def __init__(self, model: LoadedModel, plan: MemoryPlan, device: str) -> None:
        self._model, self._plan, self._device = model, plan, device

    def first(self, spec: WorkerConfig, epoch: int, wires: RankPipes) -> WorkerParts:
        """The parts of a worker, which is its first rank; returns when the others are there as well."""
        others = wires.of_first()
        model = self._part_of_model(spec, 0, wires)
        own = self._cache(spec, 0, epoch)
        ranks = OtherRanks([wire.memory for wire in others])
        engine = SplitEngine(
            TorchEngine(model, own.engine_pool),
            self._plan.layout,
            spec.split,
            [wire.steps for wire in others],
        )
        one_pool = own.engine_pool is own.landing_pool
        return WorkerParts(
            transport=ShardedTransport(own, ranks),
            landing=KvLanding() if one_pool else RankedLanding(own.landing_pool, own.engine_pool, ranks),
            engine=engine,
            eos_token_ids=frozenset(model.eos_token_ids),
            lives=engine.lives,
        )

    def run_other(self, spec: WorkerConfig, rank: int, wires: RankPipes) -> None:
        """Run another rank until the first has ended."""
        wire = wires.of(rank)
        model = self._part_of_model(spec, rank, wires)
        own = self._cache(spec, rank, epoch=0)  # peers ask the first rank whose life this is
        follower = RankFollower(wire.steps)
        memory = RankServer(own, wire.memory)
        threading.Thread(
            target=memory.serve, args=(follower.beat, RANK_HEARTBEAT_S), name="memory", daemon=True
        ).start()
        follower.follow(TorchEngine(model, own.engine_pool))

    def _part_of_model(self, spec: WorkerConfig, rank: int, wires: RankPipes) -> LoadedModel:
        torch.set_num_threads(max(1, spec.threads // spec.split.ranks))
        device = device_of(self._device, spec.first_rank + rank)
        return split_model(self._model, RankGroup(spec.split, rank, wires.store, device)).to(device)

    def _cache(self, spec: WorkerConfig, rank: int, epoch: int) -> SharedMemoryTransport:
        plan, device = self._plan, device_of(self._device, spec.first_rank + rank)
        return SharedMemoryTransport(
            spec.instance, epoch, plan.layout, plan.num_blocks, device, sharding=spec.split, rank=rank
        )


def device_of(device: str, number: int) -> str:
    """Where the service's `number`-th rank computes: each has a GPU of its own."""
    return f"cuda:{number}" if device == "cuda" else device


class TorchFactory:
    """A model whose weights all workers share, and the size of their KV caches."""

    def __init__(
        self,
        model: LoadedModel,
        name: str,
        plan: MemoryPlan,
        device: str,
        make_transport: MakeTransport,
        network: HostNetwork | None,
    ) -> None:
        self.model = name
        self._model, self._plan, self._device = model, plan, device
        self._make_transport, self._network = make_transport, network
        self.max_model_len = plan.max_model_len
        self.vocab_size = model.vocab_size
        self.kv_layout = plan.layout
        self._ranks = TorchRanks(model, plan, device)

    def parts(self, spec: WorkerConfig, epoch: int, wires: RankPipes | None = None) -> WorkerParts:
        if wires is not None:
            return self._ranks.first(spec, epoch, wires)
        torch.set_num_threads(spec.threads)
        plan, device = self._plan, device_of(self._device, spec.first_rank)
        transport = self._make_transport(
            spec.instance, epoch, plan.layout, plan.num_blocks, device, self._network
        )
        engine_pool, landing_pool = transport.engine_pool, transport.landing_pool
        swaps = plan.swap_blocks > 0 and can_swap(spec.batcher)
        return WorkerParts(
            transport=transport,
            landing=KvLanding() if engine_pool is landing_pool else StagedLanding(landing_pool, engine_pool),
            engine=TorchEngine(self._model.to(device), engine_pool),
            eos_token_ids=frozenset(self._model.eos_token_ids),
            swap_space=PoolSwapSpace(engine_pool, plan.swap_blocks) if swaps else None,
            copier=PoolCopier(engine_pool),
        )

    def run_rank(self, spec: WorkerConfig, rank: int, wires: RankPipes) -> None:
        self._ranks.run_other(spec, rank, wires)


def prepare(service: ServiceConfig, stage: ReportStage) -> TorchFactory:
    """Load the model, on one thread and onto the CPU: before a fork there must be no other threads and no CUDA."""
    config = service.engine
    torch.set_num_threads(1)
    # Libraries ask whether there is CUDA. torch would ask the driver, which does not survive a fork; so it asks NVML.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    check_device(config.device)
    stage("loading the model")
    model = load_model(config.model, dtype=config.dtype)
    for worker in service.workers:
        check_split_model(model, worker.split, config.model)
    layout, available_bytes = model.layout(config.block_size), available_memory()
    if service.store is not None:
        check_store(service.store, layout, available_bytes)
        available_bytes -= service.store.memory_bytes
    plan = plan_memory(
        layout,
        kv_cache_bytes=config.kv_cache_bytes,
        max_model_len=config.context(model.max_model_len),
        workers=len(service.workers),
        available_bytes=available_bytes,
        swap_bytes=config.swap_bytes,
        swapping=sum(can_swap(worker.batcher) for worker in service.workers),
    )
    name, make = model_fingerprint(Path(config.model)), load_transport(service.transport)
    return TorchFactory(model, name, plan, config.device, make, service.network)


def check_device(name: str) -> None:
    """Refuse a device that this torch cannot have, without touching any: workers are yet to be forked."""
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        raise ConfigurationError(f"--device {name!r} is unknown: write cpu, cuda or cuda:N") from error
    if kind not in {"cpu", "cuda"}:
        raise ConfigurationError(f"--device {name!r} is not supported: write cpu, cuda or cuda:N")
    if kind == "cuda" and torch.version.cuda is None:
        raise ConfigurationError(
            f"--device {name!r} needs a torch with CUDA, and {torch.__version__} has none"
        )
