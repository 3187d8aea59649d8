"""The parts of workers that run a model with torch."""

import os
from pathlib import Path

import torch

from twofold.curve.network import Network
from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.loader import LoadedModel, load_model
from twofold.engine.torch.parallel.model import check_model
from twofold.errors import ConfigurationError
from twofold.scheduling.batchers import GROWING
from twofold.serving.config import ServiceConfig, WorkerConfig
from twofold.serving.memory_plan import MemoryPlan, available_memory, plan_memory
from twofold.serving.model_source import model_name
from twofold.serving.store.copier import PoolCopier
from twofold.serving.store.process import check_store
from twofold.serving.worker.engines import Stage
from twofold.serving.worker.landing import Landing
from twofold.serving.worker.parts import WorkerParts
from twofold.serving.worker.pool_landing import PoolLanding
from twofold.serving.worker.pool_swapping import PoolSwapSpace
from twofold.serving.worker.torch_ranks import TorchRanks, device_of
from twofold.serving.worker.wires import Wires
from twofold.transport.pooled import MakeTransport, load_transport


class TorchPrepared:
    """A model whose weights all workers share, and the size of their KV caches."""

    def __init__(
        self,
        model: LoadedModel,
        name: str,
        plan: MemoryPlan,
        device: str,
        make_transport: MakeTransport,
        network: Network | None,
    ) -> None:
        self.model = name
        self._model, self._plan, self._device = model, plan, device
        self._make_transport, self._network = make_transport, network
        self.max_model_len = plan.max_model_len
        self.vocab_size = model.vocab_size
        self.kv_layout = plan.layout
        self._ranks = TorchRanks(model, plan, device)

    def parts(self, spec: WorkerConfig, epoch: int, wires: Wires | None = None) -> WorkerParts:
        if wires is not None:
            return self._ranks.first(spec, epoch, wires)
        torch.set_num_threads(spec.threads)
        plan, device = self._plan, device_of(self._device, spec.first_rank)
        transport = self._make_transport(
            spec.instance, epoch, plan.layout, plan.num_blocks, device, self._network
        )
        engine_pool, landing_pool = transport.engine_pool, transport.landing_pool
        swaps = plan.swap_blocks > 0 and spec.batcher in GROWING
        return WorkerParts(
            transport=transport,
            landing=Landing() if engine_pool is landing_pool else PoolLanding(landing_pool, engine_pool),
            engine=TorchEngine(self._model.to(device), engine_pool),
            eos_token_ids=frozenset(self._model.eos_token_ids),
            swap_space=PoolSwapSpace(engine_pool, plan.swap_blocks) if swaps else None,
            copier=PoolCopier(engine_pool),
        )

    def run_rank(self, spec: WorkerConfig, rank: int, wires: Wires) -> None:
        self._ranks.run_other(spec, rank, wires)


def prepare(service: ServiceConfig, stage: Stage) -> TorchPrepared:
    """Load the model, on one thread and onto the CPU: before a fork there must be no other threads and no CUDA."""
    config = service.engine
    torch.set_num_threads(1)
    # Libraries ask whether there is CUDA. torch would ask the driver, which does not survive a fork; so it asks NVML.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    check_device(config.device)
    stage("loading the model")
    model = load_model(config.model, dtype=config.dtype)
    for worker in service.workers:
        check_model(model, worker.split, config.model)
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
        swapping=sum(worker.batcher in GROWING for worker in service.workers),
    )
    name, make = model_name(Path(config.model)), load_transport(service.transport)
    return TorchPrepared(model, name, plan, config.device, make, service.network)


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
