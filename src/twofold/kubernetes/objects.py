"""Kubernetes objects of a deployment. Twofold's Helm chart renders the same objects."""

from collections.abc import Iterator
from importlib.resources import files

from twofold.errors import ConfigurationError, require
from twofold.instance import Role
from twofold.kubernetes.pods import gateway_pod, labels, worker_pod, workers_of
from twofold.kubernetes.values import Json, Values, WorkerValues
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, LIVE_ROUTERS


def check(values: Values) -> None:
    """Raise ConfigurationError if a deployment with these values could not serve requests."""
    if values.engine == "emulated":
        require(bool(values.plan), "engine emulated needs plan, with the machines to emulate")
        return
    roles = set(workers_of(values))
    require(bool(roles), "workers: all replicas are 0")
    router = values.serve.router or "jsq"
    moving = [name for name in LIVE_ROUTERS if name not in FIXED_ROLE_ROUTERS]
    if Role.MIXED in roles and len(roles) > 1 and router not in moving:
        raise ConfigurationError(f"workers.mixed beside others is for serve.router {' or '.join(moving)}, not {router}")


def objects_of(name: str, values: Values) -> list[Json]:
    """Return all Kubernetes objects of the release `name`. Raises ConfigurationError for invalid values."""
    check(values)
    return list(_objects(name, values))


def _objects(name: str, values: Values) -> Iterator[Json]:
    gateway, emulated = values.gateway, values.engine == "emulated"
    if values.cluster_key.value and not emulated:
        yield _secret(name, "cluster-key", {"cluster.key": values.cluster_key.value})
    if values.api_keys.value and not values.allow_anonymous:
        yield _secret(name, "api-keys", {"keys": values.api_keys.value})
    if values.plan:
        yield _object("v1", "ConfigMap", name, "plan", data={"plan.yaml": values.plan})
    http: Json = {"name": "http", "port": gateway.port, "targetPort": "http"}
    yield _service(name, None, "gateway", http, {"type": gateway.service_type})
    if not emulated:
        # Not-ready addresses, because the gateway is ready once workers have joined.
        bus: Json = {"name": "bus", "port": gateway.bus_port, "targetPort": "bus"}
        yield _service(name, "bus", "gateway", bus, {"type": "ClusterIP", "publishNotReadyAddresses": True})
    yield _gateway(name, values)
    if gateway.disruption_budget:
        yield _budget(name, "gateway", 0)
    for role, workers in workers_of(values).items():
        headless: Json = {"clusterIP": "None", "selector": labels(name, role.value)}
        yield _object("v1", "Service", name, role.value, spec=headless)
        yield _workers(name, values, role, workers)
        yield _budget(name, role.value, workers.max_unavailable)
    yield from _monitoring(name, values)
    if values.network_policy.enabled:
        yield from _policies(name, values)


def _gateway(name: str, values: Values) -> Json:
    """Return the StatefulSet of the gateway."""
    spec: Json = {
        "serviceName": name,
        "replicas": 1,  # a service has only one controller
        "selector": {"matchLabels": labels(name, "gateway")},
        "template": gateway_pod(name, values),
    }
    return _object("apps/v1", "StatefulSet", name, "gateway", spec=spec)


def _workers(name: str, values: Values, role: Role, workers: WorkerValues) -> Json:
    store = workers.kv_store
    spec: Json = {
        "serviceName": f"{name}-{role.value}",
        "replicas": workers.replicas,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": labels(name, role.value)},
        "template": worker_pod(name, values, role, workers),
    }
    if store.disk and store.volume_size:
        claim: Json = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": store.volume_size}}}
        if store.storage_class:
            claim["storageClassName"] = store.storage_class
        spec["volumeClaimTemplates"] = [{"metadata": {"name": "kv-store"}, "spec": claim}]
    return _object("apps/v1", "StatefulSet", name, role.value, spec=spec)


def _monitoring(name: str, values: Values) -> Iterator[Json]:
    monitor, dashboard = values.service_monitor, values.grafana_dashboard
    if monitor.enabled:
        spec: Json = {
            "selector": {"matchLabels": {**labels(name), "twofold/api": "true"}},
            "endpoints": [{"port": "http", "path": "/metrics", "interval": monitor.interval}],
        }
        yield _object("monitoring.coreos.com/v1", "ServiceMonitor", name, None, monitor.labels, spec=spec)
    if dashboard.enabled:
        text = files(__package__).joinpath("data/grafana.json").read_text(encoding="utf-8")
        yield _object("v1", "ConfigMap", name, "dashboard", dashboard.labels, data={"twofold.json": text})


def _policies(name: str, values: Values) -> Iterator[Json]:
    api: Json = {"ports": [{"port": "http"}]}
    if values.network_policy.clients:
        api["from"] = values.network_policy.clients
    yield _policy(name, "api", labels(name, "gateway"), api)
    # Workers listen on free ports, so pods of the release accept each other on all.
    internal: Json = {"from": [{"podSelector": {"matchLabels": labels(name)}}]}
    yield _policy(name, "internal", labels(name), internal)


def _policy(name: str, part: str, pods: dict[str, str], ingress: Json) -> Json:
    spec: Json = {"podSelector": {"matchLabels": pods}, "policyTypes": ["Ingress"], "ingress": [ingress]}
    return _object("networking.k8s.io/v1", "NetworkPolicy", name, part, spec=spec)


def _object(
    version: str, kind: str, name: str, part: str | None, more: dict[str, str] | None = None, **fields: object
) -> Json:
    """Return a Kubernetes object with the labels of the release, and with the labels in `more`."""
    metadata = {"name": name if part is None else f"{name}-{part}", "labels": {**labels(name), **(more or {})}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def _secret(name: str, part: str, data: dict[str, str]) -> Json:
    return _object("v1", "Secret", name, part, type="Opaque", stringData=data)


def _service(name: str, part: str | None, component: str, port: Json, spec: Json) -> Json:
    api = {"twofold/api": "true"} if part is None else {}
    return _object(
        "v1", "Service", name, part, api, spec={**spec, "selector": labels(name, component), "ports": [port]}
    )


def _budget(name: str, component: str, most: int) -> Json:
    spec = {"maxUnavailable": most, "selector": {"matchLabels": labels(name, component)}}
    return _object("policy/v1", "PodDisruptionBudget", name, component, spec=spec)
