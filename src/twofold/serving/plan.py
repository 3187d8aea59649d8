"""From what the operator asked for to the workers of a service."""

import os

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.serving.config import DEFAULT_TOKEN_BUDGET, WorkerConfig


def plan_workers(
    *,
    prefill: int,
    decode: int,
    colocated: int,
    chunked_prefill: bool,
    token_budget: int | None,
    pin_cores: bool,
) -> tuple[WorkerConfig, ...]:
    """Workers with their roles, batchers and cores; raises ConfigurationError for counts that cannot serve."""
    if colocated and (prefill or decode):
        raise ConfigurationError(
            "--colocated excludes --prefill and --decode: a service is split or it is not"
        )
    if not colocated and not (prefill and decode):
        raise ConfigurationError(
            "a split service needs at least --prefill 1 and --decode 1 (or use --colocated N)"
        )
    mixed = "chunked-prefill" if chunked_prefill else "mixed"
    kinds = (
        [(f"prefill-{i}", Role.PREFILL, "prefill") for i in range(prefill)]
        + [(f"decode-{i}", Role.DECODE, "decode") for i in range(decode)]
        + [(f"mixed-{i}", Role.MIXED, mixed) for i in range(colocated)]
    )
    cores = share_cores(len(kinds))
    return tuple(
        WorkerConfig(
            instance=instance,
            role=role,
            batcher=batcher,
            token_budget=token_budget or DEFAULT_TOKEN_BUDGET[batcher],
            cores=share if pin_cores else (),
            threads=len(share),
        )
        for (instance, role, batcher), share in zip(kinds, cores, strict=True)
    )


def share_cores(workers: int) -> list[tuple[int, ...]]:
    """Equal shares of the cores this process may use; with more workers than cores they take turns."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // workers)
    return [tuple(cores[(i * each + k) % len(cores)] for k in range(each)) for i in range(workers)]


def gateway_cores(workers: tuple[WorkerConfig, ...]) -> tuple[int, ...]:
    """Cores for the gateway: those that no decoding worker is pinned to, if there are any, else all.

    Where the cores do not suffice for everybody it is prefill that shares: a few milliseconds taken from a
    prompt are lost in its length, while the same taken from a decode step show as a gap in every stream.
    """
    everywhere = os.sched_getaffinity(0)
    decoding = {core for worker in workers if worker.role.decodes for core in worker.cores}
    return tuple(sorted(everywhere - decoding or everywhere))
