"""The commands that the pods run."""

from twofold.instance import Role
from twofold.kubernetes.values import Values, WorkerValues

KEY_FILE = "/run/twofold/cluster.key"
PLAN_DIR = "/etc/twofold/plan"
API_KEYS_DIR = "/etc/twofold/api-keys"
STORE_DIR = "/var/lib/twofold/kv"


def workers_of(values: Values) -> dict[Role, WorkerValues]:
    """The workers of each role that has pods."""
    if values.engine == "emulated":
        return {}
    all_workers = values.workers
    found = {
        Role.PREFILL: all_workers.prefill,
        Role.DECODE: all_workers.decode,
        Role.MIXED: all_workers.mixed,
    }
    return {role: workers for role, workers in found.items() if workers.replicas}


def serve_args(values: Values) -> list[str]:
    """Of the gateway, which has no workers itself unless they are emulated. Kubernetes fills in `$(POD_IP)`."""
    serve = values.serve
    args = ["serve"]
    if values.engine == "emulated":
        args += ["--engine=emulated", f"--cluster={PLAN_DIR}/plan.yaml"]
    else:
        colocated = list(workers_of(values)) == [Role.MIXED]
        args += [values.model.path, *(["--colocated=0"] if colocated else ["--prefill=0", "--decode=0"])]
        args += [f"--listen-workers=tcp://$(POD_IP):{values.gateway.bus_port}", f"--cluster-key={KEY_FILE}"]
        args += [f"--router={serve.router}", f"--handoff={serve.handoff}", f"--transport={serve.transport}"]
        args += [f"--block-size={serve.block_size}", f"--max-num-seqs={serve.max_num_seqs}"]
        if serve.max_num_batched_tokens:
            args.append(f"--max-num-batched-tokens={serve.max_num_batched_tokens}")
    args += ["--host=0.0.0.0", f"--port={values.gateway.port}", "--log-format=json"]
    if values.model.served_name:
        args.append(f"--served-model-name={values.model.served_name}")
    if serve.slo:
        args.append(f"--slo={serve.slo}")
    args.append("--allow-anonymous" if values.allow_anonymous else f"--api-keys={API_KEYS_DIR}/keys")
    return [*args, *serve.extra_args]


def join_args(name: str, values: Values, role: Role, workers: WorkerValues) -> list[str]:
    """Of the workers of a role, which find the gateway by its Service."""
    args = ["join", f"tcp://{name}-bus:{values.gateway.bus_port}", f"--cluster-key={KEY_FILE}"]
    args += [f"--model={values.model.path}", f"--{role.value}={workers.workers_per_pod}"]
    args += ["--name=$(POD_NAME)", "--address=$(POD_IP)", f"--device={workers.device}"]
    args.append(f"--kv-cache-memory-bytes={workers.kv_cache_memory}")
    store = workers.kv_store
    if store.memory:
        args.append(f"--kv-store-dram={store.memory}")
    if store.disk:
        args.append(f"--kv-store-disk={STORE_DIR}:{store.disk}")
    return [*args, "--log-format=json", *workers.extra_args]
