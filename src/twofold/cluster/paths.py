"""The ways of KV caches between the instances of a cluster, as its performance model has them: what hand-offs go by."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from twofold.cluster.profiles import InstanceProfile
from twofold.cluster.slots import InstanceSlot, instance_slots
from twofold.cluster.spec import ClusterSpec
from twofold.hardware.specs import Model
from twofold.performance.host_profile import read_host_profile
from twofold.performance.transfer import TransferModel, default_sync_s
from twofold.scheduling.cluster.handoff_policy import TransferPaths

NEVER = 1 << 62  # where a machine has no crossover: synchronisation costs more than any prefill hides


class KvEgress(NamedTuple):
    """Of an instance: its way out, how long it prefills, and from which prompt length it sends layer by layer."""

    transfer: TransferModel
    prefill_s: Callable[[int], float]
    crossover: int

    @classmethod
    def of(cls, transfer: TransferModel, prefill_s: Callable[[int], float]) -> "KvEgress":
        crossover = transfer.crossover_tokens(prefill_s)
        return cls(transfer, prefill_s, NEVER if crossover is None else crossover)


class ModelledPaths(TransferPaths):
    """By instance; the slower end of a path is not looked at, as in `TransferModel`."""

    def __init__(self, outlets: dict[str, KvEgress]) -> None:
        self.outlets = outlets

    def crossover(self, prefill: str) -> int:
        return self.outlets[prefill].crossover

    def transfer(self, prefill: str, decode: str) -> TransferModel | None:  # noqa: ARG002  (that end is not looked at)
        return self.outlets[prefill].transfer

    def prefill_s(self, prefill: str, tokens: int) -> float:
        return self.outlets[prefill].prefill_s(tokens)


def paths_of(spec: ClusterSpec, model: Model, kinds: Sequence[InstanceProfile]) -> ModelledPaths:
    """What hand-off policies may know of the cluster."""
    outlets = [KvEgress.of(transfer_model(spec, model, kind), partial(_prefill_s, kind)) for kind in kinds]
    return ModelledPaths({seat.name: outlets[seat.place] for seat in instance_slots(kinds)})


def transfer_model(spec: ClusterSpec, model: Model, kind: InstanceProfile) -> TransferModel:
    """The path of a KV cache that leaves an instance of this kind: its share of the network of its machines."""
    layout = kind.layout
    share = layout.tensor_parallel * layout.stages / kind.machine.count
    override = spec.link_bytes_per_s and spec.link_bytes_per_s * len(layout.machines_of(0))
    bytes_per_s = override or kind.machine.network_bytes_per_s * share
    latency_s, sync_s = 0.0, default_sync_s(bytes_per_s)
    if spec.profile is not None:
        link = read_host_profile(spec.profile).link
        latency_s, sync_s = link.latency_s, link.sync_s
    return TransferModel(
        kv_bytes_per_token=spec.kv_bytes_per_token or model.kv_bytes_per_token,
        layers=model.layers,
        bytes_per_s=bytes_per_s,
        latency_s=latency_s if spec.link_latency_s is None else spec.link_latency_s,
        sync_s=sync_s,
    )


def local_bandwidth(seat: InstanceSlot) -> float:
    """Bytes per second of a KV cache between instances on the same machine, or on the same machines."""
    each = seat.kind.machine.accelerator.interconnect_bytes_per_s
    return each * len(seat.kind.layout.machines_of(0))


def _prefill_s(kind: InstanceProfile, tokens: int) -> float:
    return kind.model.prefill_s(tokens, tokens * tokens)
