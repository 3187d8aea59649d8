"""Load and KV usage of servers from `/metrics`, in the names of vLLM and Twofold."""

import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import msgspec

from twofold.bench.endpoint import http_get, root_url
from twofold.errors import ConfigurationError, require

_LINE: Final = re.compile(
    r"^(?P<server>vllm|twofold):(?P<name>\w+?)(?:_total)?(?:\{(?P<labels>.*)\})? (?P<value>\S+)", re.MULTILINE
)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_BUSY: Final = {
    "num_requests_running": "running requests",
    "num_requests_waiting": "waiting requests",
    "num_requests_swapped": "swapped requests",
    "kv_cache_usage_perc": "KV usage",
    "gpu_cache_usage_perc": "KV usage",
    "kv_leases": "KV leases",
}
_PREFILLED: Final = (("twofold", "prefix_cache_queries"), ("vllm", "prompt_tokens"))
_ROUNDING: Final = 1e-6


class ServiceMetrics(msgspec.Struct, frozen=True):
    """Gauges that are low while a service is idle, and the prompt tokens of each server that may prefill."""

    busy: dict[str, float] = {}
    prefilled: dict[str, float] = {}


class Leak(msgspec.Struct, frozen=True, kw_only=True):
    """A gauge that stays above its idle value after the load."""

    gauge: str
    before: float
    after: float


async def read_metrics(urls: Sequence[str], api_key: str | None, *, required: bool = False) -> ServiceMetrics | None:
    """Read the metrics of servers; None without any. Raises ConfigurationError for a server without if `required`."""
    texts = {}
    for url in urls:
        root = root_url(url.rstrip("/").removesuffix("/metrics"))
        with suppress(*(() if required else (ConfigurationError,))):
            status, body = await http_get(f"{root}/metrics", api_key)
            require(status == 200 or not required, f"{root}/metrics answers with HTTP {status}: give another --metrics")
            if status == 200:
                texts[root.partition("//")[2]] = body.decode(errors="replace")
    metrics = parse_metrics(texts)
    return metrics if metrics.busy else None


def parse_metrics(texts: dict[str, str]) -> ServiceMetrics:
    """Parse the metrics of servers, by server, in the Prometheus text format."""
    busy, prefilled = defaultdict[str, float](float), defaultdict[str, float](float)
    decoders = set[str]()
    for server, text in texts.items():
        for line in _LINE.finditer(text):
            labels, value = dict(_LABEL.findall(line["labels"] or "")), float(line["value"])
            place = labels.get("instance", server)
            if line["name"] in _BUSY:
                busy[f"{_BUSY[line['name']]} of {place}"] += value
            elif (line["server"], line["name"]) in _PREFILLED:
                prefilled[place] += value
            elif line["name"] == "instance_role" and value:
                prefilled[place] += 0.0  # known, even if it has served nothing
                decoders.update({place} if labels["role"] == "decode" else ())
    return ServiceMetrics(busy, {place: tokens for place, tokens in prefilled.items() if place not in decoders})


def leaks(before: ServiceMetrics, after: ServiceMetrics) -> list[Leak]:
    """Return the gauges above their idle values `before`."""
    found = (Leak(gauge=gauge, before=before.busy.get(gauge, 0.0), after=value) for gauge, value in after.busy.items())
    return [leak for leak in found if leak.after > leak.before + _ROUNDING]


def idle_prefills(before: ServiceMetrics, after: ServiceMetrics) -> list[str]:
    """Return the servers that may prefill and served no prompt in between."""
    return sorted(place for place, tokens in after.prefilled.items() if tokens == before.prefilled.get(place, 0.0))
