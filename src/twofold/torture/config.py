"""Options of a fault suite."""

import msgspec

from twofold.bench.endpoint import Endpoint
from twofold.bench.prompts import PromptMaker
from twofold.torture.faults import KillCommand


class TortureConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Service and reference, prompts, clients and faults of a fault suite."""

    endpoint: Endpoint
    reference: Endpoint
    prompts: PromptMaker  # its blocks are those of the service
    num_prompts: int = 24
    max_prompt_tokens: int = 512
    max_tokens: int = 32
    ignore_eos: bool = True
    concurrency: int = 8
    duration_s: float = 60.0
    kills: tuple[KillCommand, ...] = ()
    every_s: float = 10.0
    hang_s: float = 60.0
    settle_s: float = 60.0  # for the recovery after the load
    longest_prompt: int | None = None  # upper limit of the search for the longest prompt; None: the context
    metrics: tuple[str, ...] = ()  # of servers; empty: those of the service
    api_key: str | None = None  # exclude it when serializing this struct
