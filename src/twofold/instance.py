"""An instance: one copy of the model that runs batches, and the role it plays."""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """Which phases an instance runs (Splitwise section 4.1: prompt, token and mixed pools)."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL


@dataclass(slots=True)
class InstanceLoad:
    """What a router knows of an instance.

    `pending_prefill_tokens`: prompt tokens routed here and not yet prefilled. `reserved_tokens`: KV tokens
    that the requests decoding here, or on their way here, may come to hold. `requests`: how many requests
    this instance has in either phase.
    """

    id: str
    role: Role
    pending_prefill_tokens: int = 0
    reserved_tokens: int = 0
    requests: int = 0
