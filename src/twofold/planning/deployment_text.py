"""A deployment as a file for people: YAML in the order of reading, with a comment where a name does not say enough."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from twofold.planning.deployment import Deployment

_WIDTH = 100
_COMMENTS = {
    "deployment": "layout of this file",
    "cluster": "what to run: the fields of a cluster file, as twofold simulate --config takes",
    "machines": "how many",
    "tensor_parallel": "accelerators per instance",
    "batcher": "how an instance puts its batches together; the role's own where nothing is said",
    "router": "how requests find their instances",
    "handoff": "how the KV cache travels from prefill to decode",
    "max_num_batched_tokens": "prompt tokens of an iteration, at most",
    "pipeline_chunk": "prompt tokens of a chunk, where a pipeline computes chunks of one prompt at once",
    "inline_tbt_s": "seconds that an iteration of the batcher inlined may take",
    "max_num_seqs": "sequences of an iteration, at most",
    "block_size": "tokens of a KV block",
    "memory_utilization": "share of accelerator memory for weights and KV cache",
    "swap_space_bytes": "host memory of an instance to swap to; outputs then take KV memory as they grow",
    "performance": "performance model that the expectation rests on, and whose time an emulated service takes",
    "contention": "whether transfers shared the link in the simulation",
    "rules": "of the simulation",
    "expected": "what the simulation promises",
    "rate": "requests per second that this was planned for",
    "highest_rate": "requests per second up to which the SLO was kept",
    "slo": "seconds, or splitwise: percentiles of slow-downs against the reference",
    "attainment": "share of requests that keep the SLO, at least",
    "reference": "machine that slow-downs are multiples of",
    "margins": "of each bound: what the simulation had of it, and the share that is left",
    "price_per_h": "US dollars",
    "tdp_w": "watts to provision",
    "power_w": "watts drawn at that rate, on average",
    "provenance": "where all of this comes from",
    "simulation": "version of the simulator",
    "duration_s": "seconds of arrivals per simulation, or longer for small rates",
    "models": "what times rest on, and how far they were from measurements they had not seen",
}


def deployment_text(deployment: Deployment, comment: str) -> str:
    """The file; `comment` is the text above it."""
    lines = [line for text in comment.splitlines() for line in textwrap.wrap(text, _WIDTH)]
    head = [f"# {line}" for line in lines]
    return "\n".join([*head, *_mapping(msgspec.to_builtins(deployment), 0)]) + "\n"


def _mapping(fields: Mapping[str, object], depth: int) -> Iterator[str]:
    pad = "  " * depth
    for key, value in fields.items():
        if value is None or value == ():
            continue
        comment = f"  # {_COMMENTS[key]}" if key in _COMMENTS else ""
        if isinstance(value, Mapping):
            yield f"{pad}{key}:{comment}"
            yield from _mapping(value, depth + 1)
        elif isinstance(value, tuple | list):
            yield f"{pad}{key}:{comment}"
            yield from _sequence(value, depth + 1)
        else:
            yield f"{pad}{key}: {_scalar(value)}{comment}"


def _sequence(items: Sequence[object], depth: int) -> Iterator[str]:
    pad = "  " * depth
    for item in items:
        if isinstance(item, Mapping):
            first, *rest = _mapping(item, depth + 1)
            yield f"{pad}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{pad}- {_scalar(item)}"


def _scalar(value: object) -> str:
    """JSON, which is YAML; words that cannot be taken for anything else go without quotes."""
    if isinstance(value, str) and value.isascii() and value.replace("-", "").isalpha():
        return (
            value
            if value.lower() not in {"yes", "no", "on", "off", "true", "false", "null", "y", "n"}
            else f'"{value}"'
        )
    return msgspec.json.encode(value).decode()
