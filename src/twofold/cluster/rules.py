"""Where the clusters of other simulators behave otherwise than a Twofold cluster, as named options."""

from dataclasses import dataclass

from twofold.errors import ConfigurationError
from twofold.scheduling.instance.kv_reservation import FULL_RESERVATION, KvReservation


@dataclass(frozen=True, slots=True)
class ClusterRules:
    """How a cluster treats what the papers leave open.

    `memory`: when the KV of the output is taken. `lease_retry_s`: None reserves room for a request on its decode
    instance when it arrives, first come first served; a number asks for it only when the prompt is done, and again
    after that many seconds while there is none. `over_all_tokens`: divide the time after the first token
    by all output tokens, not by the gaps between them. `endless_memory`: everything fits. `instant_handoff`: a KV cache
    is where it decodes as soon as there is one. `stagewise`: instances as in `simulation/stagewise.py`.
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
    if name not in RULES:
        raise ConfigurationError(f"there are no rules {name!r}: there are {', '.join(RULES)}")
    return RULES[name]
