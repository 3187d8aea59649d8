"""Metrics of vLLM servers, and the load that clients other than this service put on the servers."""

import re
from collections import defaultdict

import msgspec

from twofold.instance import InstanceLoad
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.instance.status import InstanceStatus

# Nine of ten lines are buckets of histograms.
_LINE = re.compile(r"^(?P<engine>\w++):(?P<name>\w++)(?<!_bucket)(?:\{.*\})? (?P<value>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_CONFIG = re.compile(r"vllm:cache_config_info\{(.*)\}")
_USAGE = "\nvllm:kv_cache_usage_perc{"  # a line for each engine


class PrefillTotals(msgspec.Struct, frozen=True):
    """Cumulative counters of a server's prefills: seconds, computed tokens and requests."""

    seconds: float = 0.0
    tokens: float = 0.0
    requests: float = 0.0

    @property
    def token_s(self) -> float:
        """Mean seconds per computed token."""
        return self.seconds / self.tokens

    def since(self, before: "PrefillTotals") -> "PrefillTotals":
        """Return the increase since the earlier counters `before`."""
        if before.requests > self.requests:
            return self  # the server has restarted since `before`
        return PrefillTotals(
            self.seconds - before.seconds, self.tokens - before.tokens, self.requests - before.requests
        )


class ServerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Load of a server, summed over its data-parallel engines. `used` is the used share of its KV blocks (0 to 1), and
    `mean_prompt` the mean prompt length in tokens.
    """

    steps: int = 0  # completed iterations, or another measure of progress
    running: int = 0  # requests
    waiting: int = 0  # requests
    blocks: int = 0  # of KV
    used: float = 0.0
    block_tokens: int = 1
    mean_prompt: float = 0.0
    prefills: PrefillTotals = PrefillTotals()

    @property
    def capacity_tokens(self) -> int | None:
        """Capacity of the KV cache in tokens; None if unknown."""
        return self.blocks * self.block_tokens or None

    @property
    def used_tokens(self) -> int:
        return round(self.used * self.blocks * self.block_tokens)

    @property
    def status(self) -> InstanceStatus:
        """Load and KV cache usage of the server as an `InstanceStatus`."""
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


def metric_sums(engine: str, text: str) -> defaultdict[str, float]:
    """Return the values of an engine's metrics, summed over labels, by name without prefix; 0 if missing."""
    sums: defaultdict[str, float] = defaultdict(float)
    for line in _LINE.finditer(text):
        if line["engine"] == engine:
            sums[line["name"]] += float(line["value"])
    return sums


def read_metrics(text: str) -> ServerMetrics:
    """Parse vLLM's metrics in the Prometheus text format. A missing metric counts as 0."""
    sums, configs = metric_sums("vllm", text), [dict(_LABEL.findall(labels)) for labels in _CONFIG.findall(text)]
    return ServerMetrics(
        steps=round(sums["iteration_tokens_total_count"]),
        running=round(sums["num_requests_running"]),
        waiting=round(sums["num_requests_waiting"]),
        blocks=sum(_number(config.get("num_gpu_blocks")) for config in configs),
        used=_ratio(sums["kv_cache_usage_perc"], text.count(_USAGE)),
        block_tokens=next((_number(config.get("block_size")) for config in configs), 0),
        mean_prompt=_ratio(sums["request_prompt_tokens_sum"], sums["request_prompt_tokens_count"]),
        prefills=PrefillTotals(
            sums["request_prefill_time_seconds_sum"],
            sums["request_prefill_kv_computed_tokens_sum"],
            sums["request_prefill_kv_computed_tokens_count"],
        ),
    )


def _ratio(total: float, count: float) -> float:
    return total / count if count else 0.0


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


class ExternalLoad(msgspec.Struct, frozen=True):
    """Load that clients other than this service put on a server: waiting and running requests, and KV tokens."""

    waiting: int = 0
    running: int = 0
    mean_prompt: int = 0
    kv_tokens: int = 0

    @property
    def requests(self) -> int:
        return self.waiting + self.running

    @property
    def prompt_tokens(self) -> int:
        return self.waiting * self.mean_prompt


class ExternalLoads:
    """Estimates the load that other clients put on each server, and adds it to the loads that routers compare."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._steps: dict[str, int] = {}
        self._latest: dict[str, ExternalLoad] = {}
        self._added: dict[str, ExternalLoad] = {}

    def update(self, instance: str, metrics: ServerMetrics) -> None:
        """Update the estimated load of other clients on a server from the server's new metrics."""
        load = self._pools.get(instance)
        if load is None:
            return
        added, before = self._added.get(instance, ExternalLoad()), self._latest.get(instance, ExternalLoad())
        # This service's requests enter and leave the metrics with a delay: the smaller of two readings counts.
        # An idle engine does not update its metrics: without an iteration, the load counts as 0.
        stalled = self._steps.get(instance) == metrics.steps
        found = ExternalLoad() if stalled else _external_load(metrics, load, added)
        self._steps[instance], self._latest[instance] = metrics.steps, found
        self._apply(load, added, _smaller(found, before))

    def forget(self, instance: str) -> None:
        """Set the estimated external load of the lost server `instance` to zero."""
        self._latest.pop(instance, None)
        load = self._pools.get(instance)
        if load is not None:
            self._apply(load, self._added.get(instance, ExternalLoad()), ExternalLoad())

    def _apply(self, load: InstanceLoad, before: ExternalLoad, now: ExternalLoad) -> None:
        self._added[load.id] = now
        load.pending_prefill_tokens += now.prompt_tokens - before.prompt_tokens
        load.prefills += now.waiting - before.waiting
        load.decodes += now.running - before.running
        load.requests += now.requests - before.requests
        load.reserved_tokens += now.kv_tokens - before.kv_tokens
        if load.place:
            self._pools.changed(load)


def _external_load(metrics: ServerMetrics, load: InstanceLoad, added: ExternalLoad) -> ExternalLoad:
    own = load.requests - added.requests
    external = max(0, metrics.running + metrics.waiting - own)
    waiting = min(external, metrics.waiting)
    kv_tokens = max(0, metrics.used_tokens - (load.reserved_tokens - added.kv_tokens)) if external else 0
    return ExternalLoad(waiting, external - waiting, round(metrics.mean_prompt), kv_tokens)


def _smaller(one: ExternalLoad, other: ExternalLoad) -> ExternalLoad:
    return ExternalLoad(
        min(one.waiting, other.waiting),
        min(one.running, other.running),
        one.mean_prompt,
        min(one.kv_tokens, other.kv_tokens),
    )
