"""Pods: containers, volumes, probes and who the processes run as."""

from hashlib import sha256

from twofold import __version__
from twofold.instance import Role
from twofold.kubernetes.commands import (
    API_KEYS_DIR,
    KEY_FILE,
    PLAN_DIR,
    STORE_DIR,
    join_args,
    serve_args,
)
from twofold.kubernetes.values import Json, PodValues, Values, WorkerValues

PROBE_S = 10
_TMP = "/tmp"  # noqa: S108  (a volume of the pod, and the one place to write to)


def labels(name: str, component: str | None = None) -> dict[str, str]:
    """Of everything in a release, or what its pods are selected by."""
    found = {"app.kubernetes.io/name": "twofold", "app.kubernetes.io/instance": name}
    return found if component is None else {**found, "app.kubernetes.io/component": component}


def gateway_pod(name: str, values: Values) -> Json:
    """The template of the gateway's pod."""
    gateway, emulated = values.gateway, values.engine == "emulated"
    ports: list[Json] = [{"name": "http", "containerPort": gateway.port}]
    if not emulated:
        ports.append({"name": "bus", "containerPort": gateway.bus_port})
    # The API answers when there are workers for both phases; health says so ever after, and life needs less.
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
    made = _pod(name, values, "gateway", gateway, container, mounts, volumes)
    if values.plan:  # a new plan is a new pod
        digest = sha256(values.plan.encode()).hexdigest()
        metadata = made["metadata"]
        assert isinstance(metadata, dict)  # noqa: S101  (made so below; tells the type checker)
        metadata["annotations"] = {"checksum/plan": digest, **gateway.annotations}
    return made


def worker_pod(name: str, values: Values, role: Role, workers: WorkerValues) -> Json:
    """The template of the pods of a role. They need no probes: a worker that hangs is ended by the gateway, and the
    command ends when it can do nothing more."""
    container: Json = {"args": join_args(name, values, role, workers)}
    mounts: list[Json] = []
    volumes: list[Json] = []
    if workers.kv_store.disk:
        mounts.append({"name": "kv-store", "mountPath": STORE_DIR})
        if not workers.kv_store.volume_size:
            volumes.append({"name": "kv-store", "emptyDir": {}})
    return _pod(name, values, role.value, workers, container, mounts, volumes)


def _pod(
    name: str,
    values: Values,
    component: str,
    pod: PodValues,
    container: Json,
    mounts: list[Json],
    volumes: list[Json],
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
    for key, value in (
        ("nodeSelector", pod.node_selector),
        ("tolerations", pod.tolerations),
        ("affinity", pod.affinity),
    ):
        if value:
            spec[key] = value
    metadata: Json = {"labels": labels(name, component)}
    if pod.annotations:
        metadata["annotations"] = pod.annotations
    return {"metadata": metadata, "spec": spec}


def _key_copier(values: Values) -> Json:
    """Kubernetes opens a mounted Secret to the group of the pod, and Twofold takes no key that others may read."""
    return {
        "name": "cluster-key",
        **_image(values),
        "command": ["install", "-m", "0400", "/etc/twofold/cluster-key/cluster.key", KEY_FILE],
        "resources": {
            "requests": {"cpu": "10m", "memory": "16Mi"},
            "limits": {"memory": "64Mi"},
        },
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
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _from_pod(variable: str, field: str) -> Json:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _probe(path: str, *, failures: int) -> Json:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": PROBE_S,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
