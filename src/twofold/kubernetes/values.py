"""Everything that can be said of a deployment: the values of the chart, their types, defaults and meaning.

The chart's `values.yaml`, `values.schema.json` and the table in its README are written from here
(`python -m twofold.kubernetes.chart`).
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=1, le=65535)]
Json = dict[str, object]


class _Values(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """One group of values."""


class Image(_Values, frozen=True):
    repository: Annotated[str, Meta(description="Image of deploy/container/Dockerfile.")] = "twofold"
    tag: Annotated[str, Meta(description="Its tag; the version of Twofold if empty.")] = ""
    pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"], Meta(description="When nodes fetch it.")
    ] = "IfNotPresent"
    pull_secrets: Annotated[list[str], Meta(description="Names of Secrets for its registry.")] = []


class ModelValues(_Values, frozen=True):
    path: Annotated[
        str, Meta(description="Model directory in every pod, or hub id: MODEL of `twofold serve`.")
    ] = "/models/model"
    served_name: Annotated[str, Meta(description="Its name in the API; that of the directory if empty.")] = ""
    mount_path: Annotated[str, Meta(description="Where `volume` appears in every pod.")] = "/models"
    volume: Annotated[
        Json,
        Meta(
            description="Volume source with the model, as in {persistentVolumeClaim: {claimName: models, readOnly: "
            "true}}; none if empty: the model is in the image then, or on the hub."
        ),
    ] = {}


class SecretText(_Values, frozen=True):
    value: Annotated[
        str, Meta(description="Contents for a Secret of the release; better is a Secret of yours.")
    ] = ""
    existing_secret: Annotated[
        str, Meta(description="Name of a Secret of yours; that of the release, made by hand, if empty.")
    ] = ""


class ServeValues(_Values, frozen=True):
    router: Annotated[str, Meta(description="`--router`.")] = "jsq"
    handoff: Annotated[str, Meta(description="`--handoff`.")] = "layer-wise"
    transport: Annotated[
        Literal["curve", "nixl", "mooncake"],
        Meta(
            description="`--transport`: curve is encrypted, the others are not and need an image with their extra."
        ),
    ] = "curve"
    block_size: Annotated[int, Meta(ge=1, description="`--block-size`: tokens in a KV block.")] = 16
    max_num_seqs: Annotated[int, Meta(ge=1, description="`--max-num-seqs`: sequences in an iteration.")] = 64
    max_num_batched_tokens: Annotated[
        str, Meta(description="`--max-num-batched-tokens`: a number or auto; its default if empty.")
    ] = ""
    slo: Annotated[str, Meta(description="`--slo`, as in ttft=2,tpot=0.1 (seconds); none if empty.")] = ""
    extra_args: Annotated[list[str], Meta(description="More flags of `twofold serve`.")] = []


class PodValues(_Values, frozen=True):
    """What gateway and workers have in common."""

    resources: Annotated[
        Json,
        Meta(
            description="Requests and limits of the container, GPUs too. Memory counts weights, KV cache and KV store; "
            "workers compute on the cores they may use, so give whole CPUs and the static CPU manager."
        ),
    ] = {}
    node_selector: Annotated[dict[str, str], Meta(description="Labels of nodes to run on.")] = {}
    tolerations: Annotated[list[Json], Meta(description="Taints of nodes to run on all the same.")] = []
    affinity: Annotated[Json, Meta(description="Rules for nodes and neighbours.")] = {}
    annotations: Annotated[dict[str, str], Meta(description="Annotations of the pods.")] = {}
    env: Annotated[list[Json], Meta(description="Environment of the container.")] = []


class GatewayValues(PodValues, frozen=True):
    port: Annotated[Port, Meta(description="Port of the API, /health, /metrics and /dashboard.")] = 8000
    bus_port: Annotated[Port, Meta(description="Port that workers join at.")] = 7600
    service_type: Annotated[
        Literal["ClusterIP", "NodePort", "LoadBalancer"], Meta(description="Type of the Service of the API.")
    ] = "ClusterIP"
    startup_seconds: Annotated[
        int,
        Meta(
            ge=10,
            description="How long the first workers may take, images and weights included: the API answers when there "
            "are workers for both phases.",
        ),
    ] = 3600
    disruption_budget: Annotated[
        bool,
        Meta(
            description="Whether a drain has to wait until somebody ends the gateway by hand: all streams end with it."
        ),
    ] = True


class KvStore(_Values, frozen=True):
    memory: Annotated[
        str, Meta(description="`--kv-store-dram`, as in 4Gi: KV of prompts in memory; none if empty.")
    ] = ""
    disk: Annotated[
        str, Meta(description="Size of `--kv-store-disk` below that, as in 100Gi; none if empty.")
    ] = ""
    volume_size: Annotated[
        str,
        Meta(
            description="Size of a volume for `disk` that outlives the pod, a little more than that; the node's own "
            "disk (emptyDir) if empty."
        ),
    ] = ""
    storage_class: Annotated[str, Meta(description="Class of that volume; the cluster's if empty.")] = ""


class WorkerValues(PodValues, frozen=True):
    replicas: Annotated[
        int,
        Meta(ge=0, description="Pods, each of which runs `twofold join` (1 prefill, 1 decode, no mixed)."),
    ] = 0
    workers_per_pod: Annotated[
        int, Meta(ge=1, description="Workers of each pod; 1 where a worker has a GPU.")
    ] = 1
    device: Annotated[str, Meta(description="`--device`: cpu or cuda.")] = "cpu"
    kv_cache_memory: Annotated[str, Meta(description="`--kv-cache-memory-bytes` of each worker.")] = "1Gi"
    kv_store: Annotated[KvStore, Meta(description="The store of KV that the workers of a pod share.")] = (
        KvStore()
    )
    max_unavailable: Annotated[
        int, Meta(ge=1, description="Pods that a drain may take at a time (PodDisruptionBudget).")
    ] = 1
    extra_args: Annotated[list[str], Meta(description="More flags of `twofold join`.")] = []


class RoleValues(_Values, frozen=True):
    prefill: Annotated[WorkerValues, Meta(description="Workers that prefill.")] = WorkerValues(replicas=1)
    decode: Annotated[WorkerValues, Meta(description="Workers that decode.")] = WorkerValues(replicas=1)
    mixed: Annotated[
        WorkerValues,
        Meta(
            description="Workers that do both phases: alone (colocated), or beside the others with router splitwise or "
            "jsq-planned."
        ),
    ] = WorkerValues()


class SecurityContext(_Values, frozen=True):
    run_as_user: Annotated[int, Meta(ge=1, description="User and group of all processes, never root.")] = (
        10001
    )


class ServiceMonitor(_Values, frozen=True):
    enabled: Annotated[bool, Meta(description="Whether Prometheus Operator is to scrape /metrics.")] = False
    interval: Annotated[str, Meta(description="How often.")] = "15s"
    labels: Annotated[dict[str, str], Meta(description="Labels that your Prometheus selects by.")] = {}


class GrafanaDashboard(_Values, frozen=True):
    enabled: Annotated[
        bool,
        Meta(description="Whether to make a ConfigMap of deploy/grafana/twofold.json for Grafana's sidecar."),
    ] = False
    labels: Annotated[dict[str, str], Meta(description="Labels that the sidecar selects by.")] = (
        msgspec.field(default_factory=lambda: {"grafana_dashboard": "1"})
    )


class NetworkPolicy(_Values, frozen=True):
    enabled: Annotated[
        bool,
        Meta(
            description="Whether pods of the release take connections only from each other, and for the API."
        ),
    ] = False
    clients: Annotated[
        list[Json], Meta(description="Peers that may use the API (NetworkPolicyPeer); everybody if empty.")
    ] = []


class Values(_Values, frozen=True):
    """All of them."""

    image: Annotated[Image, Meta(description="The container image of gateway and workers.")] = Image()
    engine: Annotated[
        Literal["torch", "emulated"],
        Meta(
            description="torch, or emulated: the gateway's pod keeps the time of the machines in `plan`, and there are "
            "no other pods."
        ),
    ] = "torch"
    model: Annotated[ModelValues, Meta(description="The model; the same files for all pods.")] = ModelValues()
    plan: Annotated[
        str,
        Meta(
            description="Text of a file of `twofold plan --output`: what emulated serves, else for the record."
        ),
    ] = ""
    cluster_key: Annotated[
        SecretText,
        Meta(
            description="Key that lets workers join, of `twofold keygen`: Secret RELEASE-cluster-key, cluster.key."
        ),
    ] = SecretText()
    api_keys: Annotated[
        SecretText,
        Meta(
            description="Lines `name key [max_concurrent] [requests_per_minute]`: Secret RELEASE-api-keys, keys."
        ),
    ] = SecretText()
    allow_anonymous: Annotated[
        bool, Meta(description="Whether the API asks for no key (no Secret then).")
    ] = False
    serve: Annotated[ServeValues, Meta(description="Flags of `twofold serve`.")] = ServeValues()
    gateway: Annotated[
        GatewayValues,
        Meta(
            description="Gateway and controller: one process, one pod, the one place that knows every request."
        ),
    ] = GatewayValues()
    workers: Annotated[RoleValues, Meta(description="A StatefulSet for each role that has replicas.")] = (
        RoleValues()
    )
    security_context: Annotated[SecurityContext, Meta(description="Who the processes run as.")] = (
        SecurityContext()
    )
    service_monitor: Annotated[ServiceMonitor, Meta(description="Metrics for Prometheus Operator.")] = (
        ServiceMonitor()
    )
    grafana_dashboard: Annotated[GrafanaDashboard, Meta(description="The dashboard for Grafana.")] = (
        GrafanaDashboard()
    )
    network_policy: Annotated[NetworkPolicy, Meta(description="Who may connect to the pods.")] = (
        NetworkPolicy()
    )
