"""The parts of workers that take their times from a performance model, as the cluster's file describes them."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from twofold.cluster.paths import local_bandwidth, transfer_model
from twofold.cluster.profiles import InstanceProfile, instance_profiles
from twofold.cluster.slots import InstanceSlot, instance_slots
from twofold.cluster.spec import ClusterSpec
from twofold.engine.emulated.engine import EmulatedEngine, LatenessMonitor, RandomTokens
from twofold.engine.emulated.prefills import LayerGroups, MonotonicClock, PrefillTimes
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.hardware.specs import Model
from twofold.scheduling.instance.swap_preemption import BlockCopy
from twofold.serving.config import DEFAULT_VOCAB_SIZE, ServiceConfig, WorkerConfig
from twofold.serving.worker.engines import RankPipes, WorkerParts
from twofold.transport.emulated import EmulatedPort, EmulatedTransport


class EmulatedFactory:
    """The machines of a cluster: their times, their memory and their network."""

    kv_layout = None

    def __init__(
        self,
        spec: ClusterSpec,
        model: Model,
        kinds: list[InstanceProfile],
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.model = spec.model
        self._spec = spec
        self._seats = {seat.name: seat for seat in instance_slots(kinds)}
        self._transfers = [transfer_model(spec, model, kind) for kind in kinds]
        self._groups = LayerGroups(model.layers)
        kv_bytes = self._transfers[0].kv_bytes_per_token
        self._layout = self._groups.layout(kv_bytes, spec.block_size)

    def parts(
        self,
        spec: WorkerConfig,
        epoch: int,
        wires: RankPipes | None = None,  # noqa: ARG002  (it has no other ranks)
    ) -> WorkerParts:
        seat, clock, prefills = self._seats[spec.instance], MonotonicClock(), PrefillTimes(self._groups)
        num_blocks = seat.profile.num_blocks(self._spec.block_size)
        engine = EmulatedEngine(
            seat.profile.timing,
            self._layout,
            num_blocks,
            prefills,
            RandomTokens(self.vocab_size),
            clock,
            LatenessMonitor(spec.instance),
        )
        port = self._port(seat)
        return WorkerParts(
            engine=engine,
            transport=EmulatedTransport(
                spec.instance, epoch, self._layout, num_blocks, port, prefills, clock
            ),
            changed=_Rests(engine.rest),
            swap_space=_SwapSpace(engine, seat.profile.swap.blocks) if seat.profile.swap.blocks else None,
        )

    def run_rank(self, spec: WorkerConfig, rank: int, wires: RankPipes) -> None:
        """There are none: a machine that is emulated takes one process, however many accelerators it has."""

    def _port(self, seat: InstanceSlot) -> EmulatedPort:
        transfer = self._transfers[seat.pool]
        return EmulatedPort(
            machine=seat.machine,
            bytes_per_s=transfer.bytes_per_s,
            local_bytes_per_s=local_bandwidth(seat),
            latency_s=transfer.latency_s,
            sync_s=max(each.sync_s for each in self._transfers),
        )


@dataclass(frozen=True, slots=True)
class _SwapSpace:
    """Memory of a host that is not there: only the time of the copies is taken."""

    engine: EmulatedEngine
    num_blocks: int

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        self.engine.copy(copies)


class _Rests(threading.Condition):
    """A worker's condition, which tells its engine when there is nothing to run."""

    def __init__(self, rest: Callable[[], None]) -> None:
        super().__init__()
        self._rest = rest

    def wait(self, timeout: float | None = None) -> bool:
        self._rest()
        return super().wait(timeout)


def prepare(config: ServiceConfig) -> EmulatedFactory:
    """Raises ConfigurationError where the cluster's machines cannot serve the context length."""
    spec = config.cluster
    assert spec is not None  # noqa: S101  (the command line sees to it; tells the type checker)
    catalog = load_catalog([Path(file) for file in config.catalog])
    kinds, model = instance_profiles(spec, catalog), catalog.model(spec.model)
    max_model_len = _context_length(config.engine.max_model_len, model, kinds, spec.block_size)
    return EmulatedFactory(spec, model, kinds, max_model_len, config.engine.vocab_size or DEFAULT_VOCAB_SIZE)


def _context_length(wanted: int | None, model: Model, kinds: list[InstanceProfile], block_size: int) -> int:
    """What was asked for, else the model's own, as far as the smallest memory holds it.

    It may be more than the model's own: nothing is computed that would notice.
    """
    smallest = min(kinds, key=lambda kind: kind.longest(block_size))
    room = smallest.longest(block_size)
    if wanted is None:
        return min(model.max_context or room, room)
    if wanted > room:
        raise ConfigurationError(
            f"--max-model-len {wanted:,} is more than the {room:,} tokens of KV cache that an instance on "
            f"{smallest.machine.name} has room for"
        )
    return wanted
