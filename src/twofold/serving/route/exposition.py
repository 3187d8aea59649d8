"""How a vLLM server is, read from its `/metrics`."""

import re
from collections import defaultdict

import msgspec

from twofold.scheduling.outcome import InstanceStatus

_LINE = re.compile(r"^vllm:(?P<name>\w+)\{(?P<labels>.*)\} (?P<value>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_USAGE, _CONFIG = "kv_cache_usage_perc", "cache_config_info"


class Prefills(msgspec.Struct, frozen=True):
    """Of all prompts since a server began: seconds, tokens that were computed, and requests."""

    seconds: float = 0.0
    tokens: float = 0.0
    requests: float = 0.0

    @property
    def token_s(self) -> float:
        """Seconds of a token, where there are any."""
        return self.seconds / self.tokens

    def since(self, before: "Prefills") -> "Prefills":
        """What has come since `before`; all of it where that was told by an earlier life of the server."""
        if before.requests > self.requests:
            return self
        return Prefills(
            self.seconds - before.seconds, self.tokens - before.tokens, self.requests - before.requests
        )


class Readings(msgspec.Struct, frozen=True, kw_only=True):
    """What is used of a server's metrics: sums over its engines, where it has several that are parallel in data.

    Counts of requests and of KV blocks, of `block_tokens` tokens each, and of the `steps` that engines have made. The
    mean prompt is that of all requests so far, 0 before there was one. An engine brings its metrics up to date with
    each step, so they may be old ones where it makes none.
    """

    steps: int
    running: int
    waiting: int
    blocks: int
    used: float
    block_tokens: int
    mean_prompt: float
    prefills: Prefills

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens that it has room for; None where it does not say."""
        return self.blocks * self.block_tokens or None

    @property
    def used_tokens(self) -> int:
        return round(self.used * self.blocks * self.block_tokens)

    @property
    def status(self) -> InstanceStatus:
        """The same in the words of our own instances."""
        return InstanceStatus(
            waiting=self.waiting,
            running=self.running,
            arriving=0,
            handing_off=0,
            lease_queue=0,
            blocks_total=max(self.blocks, 1),
            blocks_free=max(self.blocks, 1) - round(self.used * self.blocks),
            blocks_in_flight=0,
        )


def read_metrics(text: str) -> Readings:
    """What is not there counts as 0."""
    sums: defaultdict[str, float] = defaultdict(float)
    shares: list[float] = []
    blocks, block_tokens = 0, 0
    for line in _LINE.finditer(text):
        name = line["name"]
        if name == _USAGE:
            shares.append(float(line["value"]))
        elif name == _CONFIG:
            labels = dict(_LABEL.findall(line["labels"]))
            blocks += _number(labels.get("num_gpu_blocks"))
            block_tokens = block_tokens or _number(labels.get("block_size"))
        else:
            sums[name] += float(line["value"])
    return Readings(
        steps=round(sums["iteration_tokens_total_count"]),
        running=round(sums["num_requests_running"]),
        waiting=round(sums["num_requests_waiting"]),
        blocks=blocks,
        used=sum(shares) / len(shares) if shares else 0.0,
        block_tokens=block_tokens,
        mean_prompt=_ratio(sums["request_prompt_tokens_sum"], sums["request_prompt_tokens_count"]),
        prefills=Prefills(
            sums["request_prefill_time_seconds_sum"],
            sums["request_prefill_kv_computed_tokens_sum"],
            sums["request_prefill_kv_computed_tokens_count"],
        ),
    )


def _ratio(total: float, count: float) -> float:
    return total / count if count else 0.0


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
