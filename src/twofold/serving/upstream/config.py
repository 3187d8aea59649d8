"""Configuration of the command `twofold route`."""

from collections.abc import Sequence

import msgspec

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.scheduling.cluster.breaker import LONGEST_S

_EVENTS = ("events", "replay")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a vLLM server; `events` and `replay` are the endpoint and replay endpoint of its KV events."""

    instance: str
    role: Role
    url: str
    events: str | None = None
    replay: str | None = None


class RouteConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of `twofold route`. `model` is a directory with tokenizer and model config. A server that does not
    answer a health probe within `probe_timeout_s` seconds counts as down.
    """

    model: str
    vocab_size: int
    context: int  # tokens, for servers that do not tell
    servers: tuple[ServerConfig, ...]
    router: str
    early_ttft_s: float | None = None  # requests with a longer predicted TTFT are rejected
    api_key: str | None = None
    probe_timeout_s: float = 5.0
    max_restart_delay_s: float = LONGEST_S  # longest delay before a failed server gets requests again
    log_format: str = "text"


def parse_servers(role: Role, texts: Sequence[str]) -> tuple[ServerConfig, ...]:
    """Parse servers of one role from `URL[,events=ADDRESS[,replay=ADDRESS]]`. Raises ConfigurationError if invalid."""
    return tuple(_parse(f"{role.value}-{number}", role, text) for number, text in enumerate(texts))


def _parse(instance: str, role: Role, text: str) -> ServerConfig:
    url, *rest = (part.strip() for part in text.split(","))
    root = url.rstrip("/").removesuffix("/v1").rstrip("/")
    if not root.startswith(("http://", "https://")) or root.endswith(":/"):
        raise ConfigurationError(f"{url!r} is not the address of a server: write it as http://10.0.0.1:8000")
    addresses: dict[str, str] = {}
    for part in rest:
        name, _, address = part.partition("=")
        if name not in _EVENTS or not address.startswith(("tcp://", "ipc://")) or "*" in address:
            raise ConfigurationError(
                f"{text!r}: expected events=tcp://HOST:PORT or replay=tcp://HOST:PORT after the address, not {part!r}"
            )
        addresses[name] = address
    if "replay" in addresses and "events" not in addresses:
        raise ConfigurationError(f"{text!r}: replay needs the address of events too")
    return ServerConfig(instance=instance, role=role, url=root, **addresses)
