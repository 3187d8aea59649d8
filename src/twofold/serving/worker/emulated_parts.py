"""Emulated workers: instances of a cluster spec that run at the speed of their performance models."""

import threading
from collections.abc import Callable

from twofold.cluster.paths import local_bandwidth, transfer_model
from twofold.cluster.profiles import InstanceProfile, InstanceSlot, instance_profiles, instance_slots
from twofold.cluster.spec import ClusterSpec
from twofold.engine.emulated import EmulatedEngine, LayerGroups, MonotonicClock, PrefillTimes, RandomTokens
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.hardware.specs import Model
from twofold.serving.config import DEFAULT_VOCAB_SIZE, ServiceConfig, WorkerConfig
from twofold.serving.worker.engines import EngineFactory, HostSwapSpace, RankPipes, ReportStage, WorkerParts
from twofold.transport.base import KvCacheSpec
from twofold.transport.emulated import EmulatedPort, EmulatedTransport


class EmulatedFactory(EngineFactory):
    """Creates the emulated workers of a cluster spec."""

    def __init__(
        self, spec: ClusterSpec, model: Model, profiles: list[InstanceProfile], max_model_len: int, vocab_size: int
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.model = spec.model
        self._spec = spec
        self._slots = {slot.name: slot for slot in instance_slots(profiles)}
        self._transfers = [transfer_model(spec, model, profile) for profile in profiles]
        self._groups = LayerGroups(model.layers)
        kv_bytes = self._transfers[0].kv_bytes_per_token
        self._layout = self._groups.layout(kv_bytes, spec.block_size)

    def parts(self, spec: WorkerConfig, epoch: int, pipes: RankPipes | None = None) -> WorkerParts:
        slot, clock, prefills = self._slots[spec.instance], MonotonicClock(), PrefillTimes(self._groups)
        num_blocks, swap_blocks = slot.profile.num_blocks(self._spec.block_size), slot.profile.swap.blocks
        timing, tokens = slot.profile.timing, RandomTokens(self.vocab_size)
        engine = EmulatedEngine(timing, self._layout, num_blocks, prefills, tokens, clock, spec.instance)
        cache = KvCacheSpec(spec.instance, epoch, self._layout, num_blocks)
        return WorkerParts(
            engine=engine,
            transport=EmulatedTransport(cache, self._port(slot), prefills, clock),
            changed=_PausingCondition(engine.pause),
            swap_space=HostSwapSpace(swap_blocks, engine.copy) if swap_blocks else None,
        )

    def _port(self, slot: InstanceSlot) -> EmulatedPort:
        transfer = self._transfers[slot.pool]
        return EmulatedPort(
            machine=slot.machine,
            bytes_per_s=transfer.bytes_per_s,
            local_bytes_per_s=local_bandwidth(slot),
            latency_s=transfer.latency_s,
            sync_s=max(each.sync_s for each in self._transfers),
        )


class _PausingCondition(threading.Condition):
    def __init__(self, pause: Callable[[], None]) -> None:
        super().__init__()
        self._pause = pause

    def wait(self, timeout: float | None = None) -> bool:
        self._pause()  # the engine is idle while the main thread waits for work
        return super().wait(timeout)


def prepare(config: ServiceConfig, report: ReportStage) -> EmulatedFactory:
    """Return the factory of emulated workers; raises ConfigurationError if a KV cache is too small for one request."""
    report("reading the catalog")
    spec = config.cluster
    assert spec is not None  # noqa: S101  (for the type checker: the command line requires --cluster)
    catalog = load_catalog(config.catalog)
    profiles, model = instance_profiles(spec, catalog), catalog.model(spec.model)
    max_model_len = _context_length(config.engine.max_model_len, model, profiles, spec.block_size)
    return EmulatedFactory(spec, model, profiles, max_model_len, config.engine.vocab_size or DEFAULT_VOCAB_SIZE)


def _context_length(wanted: int | None, model: Model, profiles: list[InstanceProfile], block_size: int) -> int:
    smallest = min(profiles, key=lambda profile: profile.longest(block_size))
    available = smallest.longest(block_size)
    if wanted is None:
        return min(model.max_context or available, available)
    if wanted > available:  # more than the model's is allowed, because nothing is computed
        raise ConfigurationError(
            f"--max-model-len {wanted:,} exceeds the KV cache of an instance on {smallest.machine.name}, "
            f"which holds {available:,} tokens"
        )
    return wanted
