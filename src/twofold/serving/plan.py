"""From what the operator asked for to the workers of a service."""

import os

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.serving.config import DEFAULT_TOKEN_BUDGET, WorkerConfig
from twofold.simulation.cores import share_cores


def plan_workers(
    *,
    prefill: int,
    decode: int,
    colocated: int,
    chunked_prefill: bool,
    token_budget: int | None,
    pin_cores: bool,
    roles_move: bool = False,
) -> tuple[WorkerConfig, ...]:
    """Workers with their roles, batchers and cores; raises ConfigurationError for counts that cannot serve.

    Where `roles_move`, every worker can do both phases at any time, with Splitwise's batcher.
    """
    if colocated and (prefill or decode):
        raise ConfigurationError(
            "--colocated excludes --prefill and --decode: a service is split or it is not"
        )
    if not colocated and not (prefill and decode):
        raise ConfigurationError(
            "a split service needs at least --prefill 1 and --decode 1 (or use --colocated N)"
        )
    batchers = {
        Role.PREFILL: "prefill",
        Role.DECODE: "decode",
        Role.MIXED: "chunked-prefill" if chunked_prefill else "mixed",
    }
    counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.MIXED: colocated}
    kinds = [
        (f"{role.value}-{i}", role, "splitwise" if roles_move else batchers[role])
        for role, count in counts.items()
        for i in range(count)
    ]
    cores = share_cores(own_cores(), len(kinds))
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


def own_cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))
