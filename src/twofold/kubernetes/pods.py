"""Kubernetes pod templates for the gateway and the workers."""

import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Final

import msgspec

from twofold import __version__
from twofold.instance import Role
from twofold.kubernetes.values import Json, PodValues, ServeValues, Values, WorkerValues

KEY_FILE: Final = "/run/twofold/cluster.key"
PLAN_DIR: Final = "/etc/twofold/plan"
API_KEYS_DIR: Final = "/etc/twofold/api-keys"
STORE_DIR: Final = "/var/lib/twofold/kv"
PROBE_S: Final = 10
_JOIN_FLAGS: Final = {Role.PREFILL: "--prefill", Role.DECODE: "--decode", Role.MIXED: "--colocated"}
_TMP: Final = "/tmp"  # noqa: S108  (a volume of the pod, and its only writable directory)


def workers_of(values: Values) -> dict[Role, WorkerValues]:
    """Map each role with at least one replica to the Helm values of its workers."""
    if values.engine == "emulated":
        return {}
    workers = values.workers
    found = {Role.PREFILL: workers.prefill, Role.DECODE: workers.decode, Role.MIXED: workers.mixed}
    return {role: each for role, each in found.items() if each.replicas}


def serve_args(values: Values) -> list[str]:
    """Return the arguments of `twofold serve` in the gateway's pod."""
    args = ["serve"]
    if values.engine == "emulated":
        args += ["--engine=emulated", f"--cluster={PLAN_DIR}/plan.yaml"]
    else:
        colocated = list(workers_of(values)) == [Role.MIXED]
        args += [values.model.path, *(["--colocated=0"] if colocated else ["--prefill=0", "--decode=0"])]
        args += [f"--listen-workers=tcp://$(POD_IP):{values.gateway.bus_port}", f"--cluster-key={KEY_FILE}"]
    args += ["--host=0.0.0.0", f"--port={values.gateway.port}", "--log-format=json"]
    if values.model.served_name:
        args.append(f"--served-model-name={values.model.served_name}")
    args.append("--allow-anonymous" if values.allow_anonymous else f"--api-keys={API_KEYS_DIR}/keys")
    return [*args, *_flags(values.serve)]


def _flags(group: ServeValues) -> Iterator[str]:
    """Convert Helm values to flags of `twofold serve`, in the same order as the Helm chart."""
    values = msgspec.to_builtins(group)
    for key, value in sorted(values.items()):
        flag = re.sub(r"(?=[A-Z])", "-", key).lower()
        if isinstance(value, bool):
            yield f"--{'' if value else 'no-'}{flag}"
        elif value is not None and key != "extraArgs":
            yield f"--{flag}={value if isinstance(value, str) else msgspec.json.encode(value).decode()}"
    yield from values["extraArgs"]


def join_args(name: str, values: Values, role: Role, workers: WorkerValues) -> list[str]:
    """Return the arguments of `twofold join` for the workers of a role, which connect to the gateway's Service."""
    args = ["join", f"tcp://{name}-bus:{values.gateway.bus_port}", f"--cluster-key={KEY_FILE}"]
    args += [f"--model={values.model.path}", f"{_JOIN_FLAGS[role]}={workers.workers_per_pod}"]
    args += ["--name=$(POD_NAME)", "--address=$(POD_IP)", f"--device={workers.device}"]
    args.append(f"--kv-cache-memory-bytes={workers.kv_cache_memory}")
    store = workers.kv_store
    if store.memory:
        args.append(f"--kv-store-dram={store.memory}")
    if store.disk:
        args.append(f"--kv-store-disk={STORE_DIR}:{store.disk}")
    return [*args, "--log-format=json", *workers.extra_args]


def labels(name: str, component: str | None = None) -> dict[str, str]:
    """Return the labels of a release or, with `component`, the labels of that component's pods."""
    found = {"app.kubernetes.io/name": "twofold", "app.kubernetes.io/instance": name}
    return found if component is None else {**found, "app.kubernetes.io/component": component}


def gateway_pod(name: str, values: Values) -> Json:
    """Return the pod template of the gateway."""
    gateway, emulated = values.gateway, values.engine == "emulated"
    ports: list[Json] = [{"name": "http", "containerPort": gateway.port}]
    if not emulated:
        ports.append({"name": "bus", "containerPort": gateway.bus_port})
    # The API answers once both phases have a worker.
    container: Json = {
        "args": serve_args(values),
        "ports": ports,
        "startupProbe": _probe("/health", failures=-(-gateway.startup_seconds // PROBE_S)),
        "readinessProbe": _probe("/health", failures=3),
        "livenessProbe": _probe("/version", failures=6),
    }
    mounts: list[Json] = []
    volumes: list[Json] = []
    if values.plan:
        mounts.append({"name": "plan", "mountPath": PLAN_DIR, "readOnly": True})
        volumes.append({"name": "plan", "configMap": {"name": f"{name}-plan"}})
    if not values.allow_anonymous:
        mounts.append({"name": "api-keys", "mountPath": API_KEYS_DIR, "readOnly": True})
        secret = values.api_keys.existing_secret or f"{name}-api-keys"
        volumes.append({"name": "api-keys", "secret": {"secretName": secret}})
    # The checksum restarts the pod when the plan changes.
    checksum = {"checksum/plan": sha256(values.plan.encode()).hexdigest()} if values.plan else {}
    return _pod(name, values, "gateway", gateway, container, mounts, volumes, checksum)


def worker_pod(name: str, values: Values, role: Role, workers: WorkerValues) -> Json:
    """Return the pod template of a role's workers."""
    # Without probes, because the gateway stops workers that hang.
    container: Json = {"args": join_args(name, values, role, workers)}
    mounts: list[Json] = []
    volumes: list[Json] = []
    if workers.kv_store.disk:
        mounts.append({"name": "kv-store", "mountPath": STORE_DIR})
        if not workers.kv_store.volume_size:
            volumes.append({"name": "kv-store", "emptyDir": {}})
    return _pod(name, values, role.value, workers, container, mounts, volumes, {})


def _pod(
    name: str,
    values: Values,
    component: str,
    pod: PodValues,
    container: Json,
    mounts: list[Json],
    volumes: list[Json],
    checksum: dict[str, str],
) -> Json:
    user = values.security_context.run_as_user
    joins = values.engine != "emulated"
    mounts = [{"name": "tmp", "mountPath": _TMP}, *mounts]
    volumes = [{"name": "tmp", "emptyDir": {}}, *volumes]
    spec: Json = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 30,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if joins:
        mounts.append({"name": "key", "mountPath": "/run/twofold", "readOnly": True})
        secret = values.cluster_key.existing_secret or f"{name}-cluster-key"
        volumes += [
            {"name": "key", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {"name": "cluster-key", "secret": {"secretName": secret}},
        ]
        spec["initContainers"] = [_key_copier(values)]
    if values.model.volume:
        mounts.append({"name": "model", "mountPath": values.model.mount_path, "readOnly": True})
        volumes.append({"name": "model", **values.model.volume})
    spec["containers"] = [
        {
            "name": "twofold",
            **_image(values),
            "command": ["twofold"],
            **container,
            "env": [
                _from_pod("POD_NAME", "metadata.name"),
                _from_pod("POD_IP", "status.podIP"),
                {"name": "HOME", "value": _TMP},
                *pod.env,
            ],
            "resources": pod.resources,
            "securityContext": _confined(),
            "volumeMounts": mounts,
        }
    ]
    spec["volumes"] = volumes
    if values.image.pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in values.image.pull_secrets]
    nodes = {"nodeSelector": pod.node_selector, "tolerations": pod.tolerations, "affinity": pod.affinity}
    spec |= {key: value for key, value in nodes.items() if value}
    metadata: Json = {"labels": labels(name, component)}
    if annotations := checksum | pod.annotations:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": spec}


def _key_copier(values: Values) -> Json:
    """Return an init container that copies the cluster key to a private file."""
    return {
        "name": "cluster-key",
        **_image(values),
        "command": ["install", "-m", "0400", "/etc/twofold/cluster-key/cluster.key", KEY_FILE],
        "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}},
        "securityContext": _confined(),
        "volumeMounts": [
            {"name": "cluster-key", "mountPath": "/etc/twofold/cluster-key", "readOnly": True},
            {"name": "key", "mountPath": "/run/twofold"},
        ],
    }


def _image(values: Values) -> Json:
    image = values.image
    return {"image": f"{image.repository}:{image.tag or __version__}", "imagePullPolicy": image.pull_policy}


def _confined() -> Json:
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def _from_pod(variable: str, field: str) -> Json:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _probe(path: str, *, failures: int) -> Json:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": PROBE_S,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
