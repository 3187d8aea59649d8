"""The parts of a worker whose model is divided among several processes, its ranks."""

import threading

import torch

from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.loader import LoadedModel
from twofold.engine.torch.parallel.engine import BEAT_S, Follower, SplitEngine
from twofold.engine.torch.parallel.group import RankGroup
from twofold.engine.torch.parallel.model import split_model
from twofold.serving.config import WorkerConfig
from twofold.serving.memory_plan import MemoryPlan
from twofold.serving.worker.landing import Landing
from twofold.serving.worker.parts import WorkerParts
from twofold.serving.worker.split_landing import SplitLanding
from twofold.serving.worker.wires import Wires
from twofold.transport.shared_memory import SharedMemoryTransport
from twofold.transport.split import OtherRanks, RankMemory, SplitTransport


class TorchRanks:
    """Makes the ranks of the workers that are split, each in its own process, from a model that all have inherited."""

    def __init__(self, model: LoadedModel, plan: MemoryPlan, device: str) -> None:
        self._model, self._plan, self._device = model, plan, device

    def first(self, spec: WorkerConfig, epoch: int, wires: Wires) -> WorkerParts:
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
            transport=SplitTransport(own, ranks),
            landing=Landing() if one_pool else SplitLanding(own.landing_pool, own.engine_pool, ranks),
            engine=engine,
            eos_token_ids=frozenset(model.eos_token_ids),
            lives=engine.lives,
        )

    def run_other(self, spec: WorkerConfig, rank: int, wires: Wires) -> None:
        """Run another rank until the first has ended."""
        wire = wires.of(rank)
        model = self._part_of_model(spec, rank, wires)
        own = self._cache(spec, rank, epoch=0)  # peers ask the first rank whose life this is
        follower = Follower(wire.steps)
        memory = RankMemory(own, wire.memory)
        threading.Thread(
            target=memory.serve, args=(follower.beat, BEAT_S), name="memory", daemon=True
        ).start()
        follower.follow(TorchEngine(model, own.engine_pool))

    def _part_of_model(self, spec: WorkerConfig, rank: int, wires: Wires) -> LoadedModel:
        torch.set_num_threads(max(1, spec.threads // spec.split.ranks))
        device = device_of(self._device, spec.first_rank + rank)
        return split_model(self._model, RankGroup(spec.split, rank, wires.store, device)).to(device)

    def _cache(self, spec: WorkerConfig, rank: int, epoch: int) -> SharedMemoryTransport:
        plan, device = self._plan, device_of(self._device, spec.first_rank + rank)
        return SharedMemoryTransport(
            spec.instance, epoch, plan.layout, plan.num_blocks, device, split=spec.split, rank=rank
        )


def device_of(device: str, number: int) -> str:
    """Where the service's `number`-th rank computes: each has a GPU of its own."""
    return f"cuda:{number}" if device == "cuda" else device
