"""Rules of other simulators, as options of a cluster."""

from dataclasses import dataclass

from twofold.errors import ConfigurationError
from twofold.scheduling.instance.sequence import FULL_RESERVATION, KvReservation


@dataclass(frozen=True, slots=True)
class ClusterRules:
    """Behaviour on which simulators differ.

    `memory` is the KV reservation. `lease_retry_s` None reserves decode memory on arrival, first come first served;
    a number requests it after prefill and retries at that interval. `over_all_tokens` divides the time after the first
    token by the number of output tokens, not by the number of gaps. `endless_memory` removes the KV limit.
    `instant_handoff` makes KV transfers take no time. `stagewise` selects the instances of `compat/stagewise.py`.
    """

    memory: KvReservation = FULL_RESERVATION
    lease_retry_s: float | None = None
    over_all_tokens: bool = False
    endless_memory: bool = False
    instant_handoff: bool = False
    stagewise: bool = False


RULES: dict[str, ClusterRules] = {
    "twofold": ClusterRules(),
    "splitwise-sim": ClusterRules(
        KvReservation(output_at_decode_start=True, extra=1), lease_retry_s=1.0, over_all_tokens=True
    ),
    "distserve-published": ClusterRules(
        over_all_tokens=True, endless_memory=True, instant_handoff=True, stagewise=True
    ),
}


def cluster_rules(name: str) -> ClusterRules:
    """Return the rules called `name`; raises ConfigurationError if unknown."""
    if name not in RULES:
        raise ConfigurationError(f"unknown rules {name!r}: choose one of {', '.join(RULES)}")
    return RULES[name]
