"""Helm values of a deployment, from which `make chart` generates the files of the Helm chart."""

from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from twofold.cli.serve.join import JoinSettings
from twofold.cli.serve.settings import ServeSettings
from twofold.cli.settings import MAPPING, Settings, flag_name, flags_of, help_text

Port = Annotated[int, Meta(ge=1, le=65535)]
Json = dict[str, object]

# Flags of `twofold serve` that the pods set, or that apply to local workers.
_SET_BY_PODS: Final = {
    *("model", "engine", "cluster", "catalog", "served_model_name", "log_format"),
    *("prefill", "decode", "colocated", "listen_workers", "cluster_key", "pin_cores", "device"),
    *("host", "port", "api_key", "api_keys", "allow_anonymous"),
    *("launcher", "ray_address", "ray_resources", "ray_link_label"),
    *("kv_cache_memory_bytes", "kv_store_dram", "kv_store_disk", "lora_modules"),
}


class _Values(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Base class of groups of Helm values."""


def _flag(settings: type[Settings], name: str) -> Meta:
    """Return a description of a Helm value, made of the name and help text of a command-line flag."""
    return Meta(description=f"`{flag_name(name)}`: {help_text(settings, name)}")


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
        made.append((field.name, Annotated[kind | None, _flag(ServeSettings, field.name)], None))
    return made


class Image(_Values, frozen=True):
    repository: Annotated[str, Meta(description="Image of deploy/container/Dockerfile.")] = "twofold"
    tag: Annotated[str, Meta(description="Image tag; the version of Twofold if empty.")] = ""
    pull_policy: Annotated[Literal["Always", "IfNotPresent", "Never"], Meta(description="Image pull policy.")] = (
        "IfNotPresent"
    )
    pull_secrets: Annotated[list[str], Meta(description="Names of Secrets for the image registry.")] = []


class ModelValues(_Values, frozen=True):
    path: Annotated[str, Meta(description="Model directory in every pod, or hub id: MODEL of `twofold serve`.")] = (
        "/models/model"
    )
    served_name: Annotated[str, Meta(description="Name of the model in the API; that of the directory if empty.")] = ""
    mount_path: Annotated[str, Meta(description="Mount path of `volume`.")] = "/models"
    volume: Annotated[
        Json,
        Meta(
            description="Volume source with the model, as in {persistentVolumeClaim: {claimName: models, readOnly: "
            "true}}; if empty, the model is in the image or on the hub."
        ),
    ] = {}


class SecretText(_Values, frozen=True):
    value: Annotated[
        str, Meta(description="Contents of a Secret that the chart creates; `existingSecret` is safer.")
    ] = ""
    existing_secret: Annotated[
        str, Meta(description="Name of an existing Secret; the Secret of the release, created by hand, if empty.")
    ] = ""


if TYPE_CHECKING:

    class ServeValues(_Values, frozen=True):
        """Helm values for the flags of `twofold serve`."""

        router: str | None = None  # type checkers see only the values that this package reads

else:
    ServeValues = msgspec.defstruct(
        "ServeValues",
        [
            *_serve_fields(),
            ("extra_args", Annotated[list[str], Meta(description="More arguments of `twofold serve`.")], []),
        ],
        bases=(_Values,),
        frozen=True,
        kw_only=True,
    )


class PodValues(_Values, frozen=True):
    """Values that the pods of gateway and workers have in common."""

    resources: Annotated[
        Json,
        Meta(
            description="Requests and limits of the container, with GPUs. Memory holds weights, KV cache and KV store; "
            "workers pin themselves to cores, so give whole CPUs and use the static CPU manager."
        ),
    ] = {}
    node_selector: Annotated[dict[str, str], Meta(description="Node selector.")] = {}
    tolerations: Annotated[list[Json], Meta(description="Tolerations.")] = []
    affinity: Annotated[Json, Meta(description="Affinity rules.")] = {}
    annotations: Annotated[dict[str, str], Meta(description="Annotations of the pods.")] = {}
    env: Annotated[list[Json], Meta(description="Environment variables of the container.")] = []


class GatewayValues(PodValues, frozen=True):
    port: Annotated[Port, Meta(description="Port of the API, /health, /metrics and /dashboard.")] = 8000
    bus_port: Annotated[Port, Meta(description="Port at which workers join.")] = 7600
    service_type: Annotated[
        Literal["ClusterIP", "NodePort", "LoadBalancer"], Meta(description="Type of the Service of the API.")
    ] = "ClusterIP"
    startup_seconds: Annotated[
        int,
        Meta(
            ge=10,
            description="Time for the first workers to start, with image and weights: the API answers once both phases "
            "have a worker.",
        ),
    ] = 3600
    disruption_budget: Annotated[
        bool, Meta(description="Block node drains until the gateway is stopped by hand: all streams end with it.")
    ] = True


class KvStore(_Values, frozen=True):
    memory: Annotated[str, _flag(JoinSettings, "kv_store_dram")] = ""
    disk: Annotated[str, Meta(description="Disk space of `--kv-store-disk`, as in 100Gi; none if empty.")] = ""
    volume_size: Annotated[
        str, Meta(description="Size of a persistent volume for `disk`, slightly larger; emptyDir if empty.")
    ] = ""
    storage_class: Annotated[str, Meta(description="Storage class of the volume; the cluster's default if empty.")] = ""


class WorkerValues(PodValues, frozen=True):
    replicas: Annotated[int, Meta(ge=0, description="Number of pods; each runs `twofold join`.")] = 0
    workers_per_pod: Annotated[int, Meta(ge=1, description="Number of workers in a pod; 1 if a worker has a GPU.")] = 1
    device: Annotated[str, _flag(JoinSettings, "device")] = "cpu"
    kv_cache_memory: Annotated[str, _flag(JoinSettings, "kv_cache_memory_bytes")] = "1Gi"
    kv_store: Annotated[KvStore, Meta(description="KV store that the workers of a pod share.")] = KvStore()
    max_unavailable: Annotated[
        int, Meta(ge=1, description="Maximum unavailable pods during a drain (PodDisruptionBudget).")
    ] = 1
    extra_args: Annotated[list[str], Meta(description="More arguments of `twofold join`.")] = []


class RoleValues(_Values, frozen=True):
    prefill: Annotated[WorkerValues, Meta(description="Workers that prefill.")] = WorkerValues(replicas=1)
    decode: Annotated[WorkerValues, Meta(description="Workers that decode.")] = WorkerValues(replicas=1)
    mixed: Annotated[
        WorkerValues,
        Meta(description="Workers that run both phases: alone, or beside the others with a router that moves roles."),
    ] = WorkerValues()


class SecurityContext(_Values, frozen=True):
    run_as_user: Annotated[int, Meta(ge=1, description="User and group id of all processes.")] = 10001


class ServiceMonitor(_Values, frozen=True):
    enabled: Annotated[bool, Meta(description="Create a ServiceMonitor for Prometheus Operator.")] = False
    interval: Annotated[str, Meta(description="Scrape interval.")] = "15s"
    labels: Annotated[dict[str, str], Meta(description="Labels that Prometheus selects by.")] = {}


class GrafanaDashboard(_Values, frozen=True):
    enabled: Annotated[
        bool, Meta(description="Create a ConfigMap with deploy/grafana/twofold.json for Grafana's sidecar.")
    ] = False
    labels: Annotated[dict[str, str], Meta(description="Labels that the sidecar selects by.")] = msgspec.field(
        default_factory=lambda: {"grafana_dashboard": "1"}
    )


class NetworkPolicy(_Values, frozen=True):
    enabled: Annotated[
        bool, Meta(description="Accept connections only between pods of the release, and to the API.")
    ] = False
    clients: Annotated[
        list[Json], Meta(description="Peers that may use the API (NetworkPolicyPeer); all if empty.")
    ] = []


class Values(_Values, frozen=True):
    """All Helm values of a deployment."""

    image: Annotated[Image, Meta(description="Container image of gateway and workers.")] = Image()
    engine: Annotated[
        Literal["torch", "emulated"],
        Meta(description="torch, or emulated: the gateway's pod emulates the machines in `plan`, without other pods."),
    ] = "torch"
    model: Annotated[ModelValues, Meta(description="The model, the same for all pods.")] = ModelValues()
    plan: Annotated[
        str,
        Meta(description="Text of a file of `twofold plan --output`; emulated serves it, otherwise it is a record."),
    ] = ""
    cluster_key: Annotated[
        SecretText, Meta(description="Cluster key of `twofold keygen`: Secret RELEASE-cluster-key, key cluster.key.")
    ] = SecretText()
    api_keys: Annotated[
        SecretText,
        Meta(
            description="Lines of `name key [max_concurrent] [requests_per_minute]`: Secret RELEASE-api-keys, key keys."
        ),
    ] = SecretText()
    allow_anonymous: Annotated[bool, Meta(description="Serve the API without keys.")] = False
    serve: Annotated[ServeValues, Meta(description="Flags of `twofold serve`; null omits the flag.")] = ServeValues()
    gateway: Annotated[GatewayValues, Meta(description="Gateway and controller: one process in one pod.")] = (
        GatewayValues()
    )
    workers: Annotated[RoleValues, Meta(description="Workers by role; a StatefulSet for each role with replicas.")] = (
        RoleValues()
    )
    security_context: Annotated[SecurityContext, Meta(description="User of the processes.")] = SecurityContext()
    service_monitor: Annotated[ServiceMonitor, Meta(description="Metrics for Prometheus Operator.")] = ServiceMonitor()
    grafana_dashboard: Annotated[GrafanaDashboard, Meta(description="Dashboard for Grafana.")] = GrafanaDashboard()
    network_policy: Annotated[NetworkPolicy, Meta(description="Connections that the pods accept.")] = NetworkPolicy()
