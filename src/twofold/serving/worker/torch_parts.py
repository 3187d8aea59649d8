"""Parts of a worker that runs a model with torch, such as the engine and the transport."""

import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from twofold.engine.base import SequenceStep
from twofold.engine.devices import DEFAULT_UTILIZATION, DeviceMemory, choose_device, place_ranks
from twofold.engine.grammar import GrammarMatchers
from twofold.engine.rank_link import FirstRankLink
from twofold.engine.tokenizer import tokenizer_json
from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.loader import LoadedModel, load_model
from twofold.engine.torch.pool import KvPool, copy_blocks
from twofold.engine.torch.ranks import RankIteration, SplitEngine, follow
from twofold.engine.torch.split_model import RankGroup, check_split_model, split_model
from twofold.errors import require
from twofold.scheduling.batchers import can_swap
from twofold.scheduling.instance.swap_preemption import BlockCopy
from twofold.security.network import HostNetwork
from twofold.serving.config import ServiceConfig, WorkerConfig
from twofold.serving.launch.memory_plan import MemoryPlan, available_memory, plan_memory
from twofold.serving.launch.model_source import loaded_line, model_fingerprint
from twofold.serving.store.copier import PoolCopier
from twofold.serving.store.server import check_store
from twofold.serving.worker.engines import EngineFactory, HostSwapSpace, RankPipes, ReportStage, WorkerParts
from twofold.serving.worker.state import KvLanding
from twofold.transport.base import KvCacheSpec
from twofold.transport.pooled import MakeTransport, load_transport
from twofold.transport.sharded import OtherRanks, RankServer, ShardedTransport
from twofold.transport.shared_memory import SharedMemoryTransport


class StagedLanding(KvLanding):
    """Copies received blocks from a pool in host memory to the engine's pool on an accelerator."""

    def __init__(self, landing_pool: KvPool, engine_pool: KvPool, ranks: OtherRanks | None = None) -> None:
        # The pools of rank 0. The other ranks copy their shards between pools of their own.
        self._landing_pool, self._engine_pool, self._ranks = landing_pool, engine_pool, ranks
        self._waiting: list[tuple[str, Sequence[int]]] = []

    def received(self, request_id: str, blocks: Sequence[int]) -> None:
        self._waiting.append((request_id, tuple(blocks)))

    def take(self) -> list[Sequence[int]]:
        waiting, self._waiting = self._waiting, []
        return [blocks for _, blocks in waiting]

    def drop(self, request_id: str) -> None:
        self._waiting = [(rid, blocks) for rid, blocks in self._waiting if rid != request_id]

    def copy(self, block_lists: Sequence[Sequence[int]]) -> None:
        if self._ranks is not None and block_lists:
            self._ranks.ask(partial(RankServer.copy_to_engine, block_lists=block_lists))
        for blocks in block_lists:
            copy_blocks(self._landing_pool, self._landing_pool.layers, blocks, self._engine_pool, blocks)


def swap_blocks(device: KvPool, host: KvPool, copies: Sequence[BlockCopy]) -> None:
    """Copy KV blocks from the pool of a device to a pool in host memory, or back."""
    for copy in copies:
        if copy.out:
            copy_blocks(device, device.layers, copy.device_blocks, host, copy.host_blocks)
        else:
            copy_blocks(host, host.layers, copy.host_blocks, device, copy.device_blocks)


class TorchFactory(EngineFactory):
    """Creates torch workers, which share one model that the fork server has loaded."""

    def __init__(
        self,
        model: LoadedModel,
        name: str,
        plan: MemoryPlan,
        devices: Mapping[str, tuple[str, ...]],  # of the ranks of each worker
        make_transport: MakeTransport,
        network: HostNetwork | None,
        tokenizer: Path,
        utilization: float | None = None,  # share of a GPU's memory; None: the KV cache is that of the plan
        most_bytes: int = sys.maxsize,  # for the KV cache of a rank
    ) -> None:
        self.model = name
        self._tokenizer = tokenizer  # directory
        self._model, self._plan, self._devices = model, plan, devices
        self._utilization, self._most_bytes = utilization, most_bytes
        self._sharing = Counter(chain.from_iterable(devices.values()))
        self.device = f"{', '.join(self._sharing)}, {plan.layout.dtype}" if devices else ""
        self._make_transport, self._network = make_transport, network
        self.max_model_len = plan.max_model_len
        self.vocab_size = model.vocab_size
        self.kv_layout = plan.layout

    def parts(self, spec: WorkerConfig, epoch: int, pipes: RankPipes | None = None) -> WorkerParts:
        if pipes is not None:
            return self._sharded_parts(spec, epoch, pipes)
        torch.set_num_threads(spec.threads)
        plan, device = self._plan, self._devices[spec.instance][0]
        model = self._model.to(device)
        num_blocks = self._num_blocks(spec, model, device)
        cache = KvCacheSpec(spec.instance, epoch, plan.layout, num_blocks, device, self._network)
        transport = self._make_transport(cache)
        engine_pool, landing_pool = transport.engine_pool, transport.landing_pool
        grammars = self._grammars()
        swap_space = None
        if plan.swap_blocks > 0 and can_swap(spec.batcher):
            host_pool = KvPool(plan.layout, plan.swap_blocks)  # the system allocates its pages on first use
            swap_space = HostSwapSpace(plan.swap_blocks, partial(swap_blocks, engine_pool, host_pool))
        return WorkerParts(
            transport=transport,
            landing=KvLanding() if engine_pool is landing_pool else StagedLanding(landing_pool, engine_pool),
            engine=TorchEngine(model, engine_pool, grammars),
            grammars=grammars,
            eos_token_ids=frozenset(self._model.eos_token_ids),
            swap_space=swap_space,
            copier=PoolCopier(engine_pool),
        )

    def _grammars(self) -> GrammarMatchers:
        return GrammarMatchers(partial(tokenizer_json, self._tokenizer), self.vocab_size, self._model.eos_token_ids)

    def _sharded_parts(self, spec: WorkerConfig, epoch: int, pipes: RankPipes) -> WorkerParts:
        others = pipes.of_first()
        model, own = self._shard(spec, 0, pipes, epoch)
        ranks, grammars = OtherRanks([pipe.memory for pipe in others]), self._grammars()
        first, steps = TorchEngine(model, own.engine_pool, grammars), [pipe.steps for pipe in others]
        engine = SplitEngine(first, self._plan.layout, spec.split, steps)
        one_pool = own.engine_pool is own.landing_pool
        return WorkerParts(
            transport=ShardedTransport(own, ranks),
            landing=KvLanding() if one_pool else StagedLanding(own.landing_pool, own.engine_pool, ranks),
            engine=engine,
            grammars=grammars,
            eos_token_ids=frozenset(model.eos_token_ids),
            ranks_alive=engine.ranks_alive,
        )

    def run_rank(self, spec: WorkerConfig, rank: int, pipes: RankPipes) -> None:
        pipe = pipes.of(rank)
        model, own = self._shard(spec, rank, pipes, epoch=0)  # peers check only the epoch of rank 0
        link = FirstRankLink[RankIteration](pipe.steps, RankIteration)
        RankServer(own, pipe.memory).start(link.heartbeat)
        follow(link, TorchEngine(model, own.engine_pool, self._grammars()))

    def _shard(
        self, spec: WorkerConfig, rank: int, pipes: RankPipes, epoch: int
    ) -> tuple[LoadedModel, SharedMemoryTransport]:
        torch.set_num_threads(max(1, spec.threads // spec.split.ranks))
        device = self._devices[spec.instance][rank]
        group = RankGroup(spec.split, rank, pipes.store, device)
        model = split_model(self._model, group).to(device)
        num_blocks = group.least(self._num_blocks(spec, model, device))
        cache = KvCacheSpec(spec.instance, epoch, self._plan.layout, num_blocks, device)
        return model, SharedMemoryTransport(cache, spec.split, rank)

    def _num_blocks(self, spec: WorkerConfig, model: LoadedModel, device: str) -> int:
        """Return the number of KV blocks of a rank, by the plan or by the memory of its GPU."""
        plan = self._plan
        if self._utilization is None:
            return plan.num_blocks
        layout = model.layout(plan.layout.block_size)
        tokens = min(spec.largest_batch(plan.max_model_len), plan.max_model_len)
        share = self._utilization / self._sharing[device]
        kv_bytes = measure_memory(model, layout.block_size, tokens, device).for_kv(share)
        found = min(kv_bytes, self._most_bytes) // layout.bytes_per_block
        require(
            found >= plan.num_blocks,
            f"{device} has room for {found * layout.block_size:,} tokens of KV beside the weights, and one request may "
            f"need {plan.max_model_len:,}: lower --max-model-len or raise --gpu-memory-utilization",
        )
        return found


def measure_memory(model: LoadedModel, block_size: int, tokens: int, device: str) -> DeviceMemory:
    """Run the largest batch, a prompt of `tokens` tokens, on the GPU with the weights, and return its memory."""
    cuda, loaded, blocks = torch.cuda, torch.cuda.memory_reserved(device), -(-tokens // block_size)
    engine = TorchEngine(model, KvPool(model.layout(block_size), blocks, device=device))
    engine.run([SequenceStep("", [0] * tokens, start=0, block_table=tuple(range(blocks)), sampling=None)])
    del engine
    peak = cuda.max_memory_reserved(device)
    cuda.empty_cache()
    free, total = cuda.mem_get_info(device)
    return DeviceMemory(total, free, loaded, peak)


def prepare(service: ServiceConfig, report: ReportStage) -> TorchFactory:
    """Load the model on the CPU, and return the factory of torch workers."""
    config = service.engine
    torch.set_num_threads(1)  # a process with threads must not fork
    # Libraries ask torch whether CUDA is available. With NVML it can answer without a context, which no fork survives.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    device = choose_device(config.device)
    ranks = {worker.instance: worker.split.ranks for worker in service.workers}
    devices = place_ranks(device, ranks, torch.cuda.device_count())
    report("loading the model")
    began_s = time.monotonic()
    model = load_model(config.model, dtype=config.dtype)
    report(f"{loaded_line(Path(config.model), time.monotonic() - began_s)}, for all workers of this host")
    for worker in service.workers:
        check_split_model(model, worker.split, config.model)
    layout, available_bytes = model.layout(config.block_size), available_memory()
    if service.store is not None:
        check_store(service.store, layout, available_bytes)
        available_bytes -= service.store.memory_bytes
    kv_cache_bytes, max_model_len = config.kv_cache_bytes, config.context(model.max_model_len)
    share, utilization, most_bytes = config.gpu_memory_utilization, None, sys.maxsize
    if kv_cache_bytes is None:
        require(share is None or device != "cpu", "--gpu-memory-utilization needs a GPU, and workers use the CPU")
    if kv_cache_bytes is None and device != "cpu":
        utilization = share or DEFAULT_UTILIZATION
        if service.transport != "nixl":  # a copy of each block is in host memory
            most_bytes = available_bytes // max(1, sum(ranks.values()))
        kv_cache_bytes = layout.pool_bytes(-(-max_model_len // config.block_size))  # the least; workers find the most
    plan = plan_memory(
        layout,
        kv_cache_bytes=kv_cache_bytes,
        max_model_len=max_model_len,
        workers=len(service.workers),
        available_bytes=available_bytes,
        swap_bytes=config.swap_bytes,
        swapping=sum(can_swap(worker.batcher) for worker in service.workers),
    )
    name, make = model_fingerprint(Path(config.model)), load_transport(service.transport)
    tokenizer = Path(config.tokenizer or config.model)
    return TorchFactory(model, name, plan, devices, make, service.network, tokenizer, utilization, most_bytes)
