"""Helm values of a deployment, from which `make chart` generates the files of the Helm chart."""

from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from twofold.cli.serve.settings import ServeSettings
from twofold.cli.settings import MAPPING, flags_of

Port = Annotated[int, Meta(ge=1, le=65535)]
Json = dict[str, object]

# Flags of `twofold serve` that the pods set, or that apply to local workers.
_SET_BY_PODS: Final = {
    *("model", "engine", "cluster", "catalog", "served_model_name", "log_format"),
    *("prefill", "decode", "colocated", "listen_workers", "cluster_key", "pin_cores", "device"),
    *("host", "port", "api_key", "api_keys", "allow_anonymous"),
    *("launcher", "ray_address", "ray_resources", "ray_link_label"),
    *("kv_cache_memory_bytes", "gpu_memory_utilization", "kv_store_dram", "kv_store_disk", "lora_modules"),
}


class _Values(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Base class of groups of Helm values. Each value has a description in tools/chart.toml."""


def _serve_fields() -> list[tuple[str, Any, Any]]:
    """Return the Helm values for the flags of `twofold serve`, as field definitions for `msgspec.defstruct`."""
    hints, flags = get_type_hints(ServeSettings), flags_of(ServeSettings)
    made: list[tuple[str, Any, Any]] = []
    for field in fields(ServeSettings):
        if field.name in _SET_BY_PODS:
            continue
        # A null value omits the flag.
        flag, kind = flags[field.name], hints[field.name]
        if flag.parse is not None or flag.metavar == MAPPING:
            kind = Json if flag.metavar == MAPPING else int | str
        elif flag.choices:
            kind = Literal[tuple(flag.choices)]
        elif Path in {kind, *get_args(kind)}:
            kind = str
        if flag.ge is not None or flag.le is not None:
            (number,) = set(get_args(kind) or (kind,)) - {NoneType}
            kind = Annotated[number, Meta(ge=flag.ge, le=flag.le)]
        made.append((field.name, kind | None, None))
    return made


class Image(_Values, frozen=True):
    repository: str = "twofold"
    tag: str = ""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    pull_secrets: list[str] = []


class ModelValues(_Values, frozen=True):
    path: str = "/models/model"
    served_name: str = ""
    mount_path: str = "/models"
    volume: Json = {}


class SecretText(_Values, frozen=True):
    value: str = ""
    existing_secret: str = ""


if TYPE_CHECKING:

    class ServeValues(_Values, frozen=True):
        """Helm values for the flags of `twofold serve`."""

        router: str | None = None  # type checkers see only the values that this package reads

else:
    ServeValues = msgspec.defstruct(
        "ServeValues", [*_serve_fields(), ("extra_args", list[str], [])], bases=(_Values,), frozen=True, kw_only=True
    )


class PodValues(_Values, frozen=True):
    """Values that the pods of gateway and workers have in common."""

    resources: Json = {}
    node_selector: dict[str, str] = {}
    tolerations: list[Json] = []
    affinity: Json = {}
    annotations: dict[str, str] = {}
    env: list[Json] = []


class GatewayValues(PodValues, frozen=True):
    port: Port = 8000
    bus_port: Port = 7600
    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    startup_seconds: Annotated[int, Meta(ge=10)] = 3600
    disruption_budget: bool = True


class KvStore(_Values, frozen=True):
    memory: str = ""
    disk: str = ""
    volume_size: str = ""
    storage_class: str = ""


class WorkerValues(PodValues, frozen=True):
    replicas: Annotated[int, Meta(ge=0)] = 0
    workers_per_pod: Annotated[int, Meta(ge=1)] = 1
    device: str = "cpu"
    kv_cache_memory: str = "1Gi"
    kv_store: KvStore = KvStore()
    max_unavailable: Annotated[int, Meta(ge=1)] = 1
    extra_args: list[str] = []


class RoleValues(_Values, frozen=True):
    prefill: WorkerValues = WorkerValues(replicas=1)
    decode: WorkerValues = WorkerValues(replicas=1)
    mixed: WorkerValues = WorkerValues()


class SecurityContext(_Values, frozen=True):
    run_as_user: Annotated[int, Meta(ge=1)] = 10001


class ServiceMonitor(_Values, frozen=True):
    enabled: bool = False
    interval: str = "15s"
    labels: dict[str, str] = {}


class GrafanaDashboard(_Values, frozen=True):
    enabled: bool = False
    labels: dict[str, str] = msgspec.field(default_factory=lambda: {"grafana_dashboard": "1"})


class NetworkPolicy(_Values, frozen=True):
    enabled: bool = False
    clients: list[Json] = []


class Values(_Values, frozen=True):
    """All Helm values of a deployment."""

    image: Image = Image()
    engine: Literal["torch", "emulated"] = "torch"
    model: ModelValues = ModelValues()
    plan: str = ""
    cluster_key: SecretText = SecretText()
    api_keys: SecretText = SecretText()
    allow_anonymous: bool = False
    serve: ServeValues = ServeValues()
    gateway: GatewayValues = GatewayValues()
    workers: RoleValues = RoleValues()
    security_context: SecurityContext = SecurityContext()
    service_monitor: ServiceMonitor = ServiceMonitor()
    grafana_dashboard: GrafanaDashboard = GrafanaDashboard()
    network_policy: NetworkPolicy = NetworkPolicy()
