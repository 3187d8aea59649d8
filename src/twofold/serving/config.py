"""What a service is made of: one value, written by the command line and read by every process."""

import msgspec

from twofold.handoff import HandoffMode
from twofold.instance import Role

# For hand-offs chosen by size: the prompt length from which Splitwise (section 6.2) sends layer by layer on its H100s.
CROSSOVER_TOKENS = 512
DEFAULT_TOKEN_BUDGET = {"prefill": 2048, "decode": 2048, "mixed": 2048, "chunked-prefill": 512}


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How each worker runs the model. `kv_cache_bytes` is per worker; None means a default for the device."""

    model: str
    dtype: str = "auto"
    device: str = "cpu"
    block_size: int = 16
    kv_cache_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One worker: its role, the batcher that goes with it, and the cores it may run on (empty: any)."""

    instance: str
    role: Role
    batcher: str
    token_budget: int
    cores: tuple[int, ...] = ()
    threads: int = 1


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole service. `run_dir` holds its sockets; `journal_dir` receives decision journals if set."""

    engine: EngineConfig
    workers: tuple[WorkerConfig, ...]
    run_dir: str
    router: str = "jsq"
    handoff: str = HandoffMode.LAYER_WISE.value
    lease_s: float = 30.0
    journal_dir: str | None = None
    log_format: str = "text"

    def inbox(self, name: str) -> str:
        """The address of a process's inbox: a socket in a directory that only its user can enter."""
        return f"ipc://{self.run_dir}/{name}.sock"


CONTROLLER = "controller"
