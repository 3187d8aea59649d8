"""KV transfer paths between instances, modelled from the cluster spec."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from twofold.cluster.profiles import InstanceProfile, InstanceSlot, instance_slots, measured_on
from twofold.cluster.spec import ClusterSpec
from twofold.hardware.specs import Model
from twofold.performance.transfer import TransferModel, default_sync_s
from twofold.scheduling.cluster.scheduler import TransferPaths

_NO_CROSSOVER = 1 << 62  # layer-wise transfer is never faster: synchronisation takes longer than the overlap saves

_NEVER_S = 1e6  # synchronization of a path on which layer-wise transfer is impossible


class KvEgress(NamedTuple):
    """KV transfer model of a prefill instance, and its prefill time in seconds for a prompt length in tokens."""

    transfer: TransferModel
    prefill_s: Callable[[int], float]


class ModelledPaths(TransferPaths):
    """KV transfer paths of prefill instances, modelled from the cluster spec."""

    def __init__(self, egress: dict[str, KvEgress]) -> None:
        found = {path: path.transfer.crossover_tokens(path.prefill_s) for path in set(egress.values())}
        crossovers = {path: _NO_CROSSOVER if tokens is None else tokens for path, tokens in found.items()}
        super().__init__({name: crossovers[path] for name, path in egress.items()})
        self.egress = egress

    def transfer(self, prefill: str, decode: str) -> TransferModel | None:
        return self.egress[prefill].transfer  # the same to every decode instance

    def prefill_s(self, prefill: str, tokens: int) -> float:
        return self.egress[prefill].prefill_s(tokens)


def paths_of(spec: ClusterSpec, model: Model, profiles: Sequence[InstanceProfile]) -> ModelledPaths:
    """Build the KV transfer paths of all instances of a cluster."""
    egress = [KvEgress(transfer_model(spec, model, profile), profile.prefill_s) for profile in profiles]
    return ModelledPaths({slot.name: egress[slot.pool] for slot in instance_slots(profiles)})


def transfer_model(spec: ClusterSpec, model: Model, profile: InstanceProfile) -> TransferModel:
    """Create the timing model of an instance's outgoing KV transfers."""
    layout = profile.layout
    share = layout.tensor_parallel * layout.stages / profile.machine.count
    override = spec.link_bytes_per_s and spec.link_bytes_per_s * len(layout.machines_of(0))
    bytes_per_s = override or profile.machine.network_bytes_per_s * share
    latency_s, sync_s = 0.0, default_sync_s(bytes_per_s)
    measured = measured_on(spec, profile.machine)
    if measured is not None and measured.link is not None:
        latency_s, sync_s = measured.link.latency_s, measured.link.sync_s if measured.link.layer_wise else _NEVER_S
    return TransferModel(
        kv_bytes_per_token=spec.kv_bytes_per_token or model.kv_bytes_per_token,
        layers=model.layers,
        bytes_per_s=bytes_per_s,
        latency_s=latency_s if spec.link_latency_s is None else spec.link_latency_s,
        sync_s=sync_s,
    )


def local_bandwidth(slot: InstanceSlot) -> float:
    """Return the bandwidth of KV transfers inside an instance's machines, in bytes/s, added over several machines."""
    each = slot.profile.machine.accelerator.interconnect_bytes_per_s
    return each * len(slot.profile.layout.machines_of(0))
