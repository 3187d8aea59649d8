"""From what the operator asked for to the workers of a service."""

import os
from collections.abc import Sequence

import msgspec

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.scheduling.batchers import INLINED, WHOLE_PROMPTS
from twofold.serving.config import AUTO, JoinTerms, TokenBudget, WorkerConfig
from twofold.simulation.cores import share_cores


def plan_workers(
    *,
    prefill: int,
    decode: int,
    colocated: int,
    chunked_prefill: bool,
    max_num_batched_tokens: TokenBudget | None,
    pin_cores: bool,
    inlines: bool = False,
    roles_move: bool = False,
    others_join: bool = False,
) -> tuple[WorkerConfig, ...]:
    """Workers with their roles, batchers and cores; raises ConfigurationError for counts that cannot serve.

    Where it `inlines`, whole prompts join decodes only in time. Where `roles_move`, every worker can do both phases at
    any time, with Splitwise's batcher. Where `others_join`, other hosts may bring what is missing here.
    """
    if colocated and (prefill or decode):
        raise ConfigurationError(
            "--colocated excludes --prefill and --decode: a service is split or it is not"
        )
    if not colocated and not (prefill and decode) and not others_join:
        raise ConfigurationError(
            "a split service needs at least --prefill 1 and --decode 1 (or use --colocated N)"
        )
    counts = {Role.PREFILL: prefill, Role.DECODE: decode, Role.MIXED: colocated}
    terms = join_terms(
        colocated=colocated > 0,
        chunked_prefill=chunked_prefill,
        max_num_batched_tokens=max_num_batched_tokens,
        inlines=inlines,
        roles_move=roles_move,
    )
    workers = [
        terms.worker(f"{role.value}-{i}", role) for role, count in counts.items() for i in range(count)
    ]
    return with_cores(workers, pin_cores=pin_cores)


def join_terms(
    *,
    colocated: bool,
    chunked_prefill: bool,
    max_num_batched_tokens: TokenBudget | None,
    inlines: bool = False,
    roles_move: bool = False,
) -> JoinTerms:
    """The batchers of a service's workers, by their roles; raises ConfigurationError for a budget none can have."""
    batchers = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
    if colocated:
        whole = INLINED if inlines else "mixed"
        batchers = {Role.MIXED: "chunked-prefill" if chunked_prefill and not inlines else whole}
    if roles_move:
        batchers = dict.fromkeys(Role, "splitwise")
    if max_num_batched_tokens == AUTO and not any(batcher in WHOLE_PROMPTS for batcher in batchers.values()):
        raise ConfigurationError(
            "--max-num-batched-tokens auto is for workers that take whole prompts: leave out chunked prefill "
            "(--no-enable-chunked-prefill) and the router splitwise, or give a number"
        )
    return JoinTerms(batchers=batchers, max_num_batched_tokens=max_num_batched_tokens)


def with_cores(workers: Sequence[WorkerConfig], *, pin_cores: bool) -> tuple[WorkerConfig, ...]:
    """The workers of one host, with equal shares of its cores to compute on."""
    if not workers:
        return ()
    return tuple(
        msgspec.structs.replace(worker, cores=share if pin_cores else (), threads=len(share))
        for worker, share in zip(workers, share_cores(own_cores(), len(workers)), strict=True)
    )


def own_cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))
