"""What `twofold route` is told of the servers behind it."""

from collections.abc import Sequence

import msgspec

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.scheduling.cluster.breaker import LONGEST_S

_EVENTS = ("events", "replay")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A vLLM server: what it is called here, its address and, where they are known, those of its KV events.

    `events` publishes what comes to its prefix cache and goes; `replay` repeats what was published before.
    """

    instance: str
    role: Role
    url: str
    events: str | None = None
    replay: str | None = None


class RouteConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A service in front of servers. `model` is the directory of its tokenizer and its configuration.

    A server that says nothing for `probe_timeout_s` seconds counts as lost; one that fails again and again is left
    alone for `max_restart_delay_s` at most. `api_key` is what the servers ask for. With `early_ttft_s` requests are
    refused whose first token is predicted later.
    """

    model: str
    vocab_size: int
    servers: tuple[ServerConfig, ...]
    router: str
    early_ttft_s: float | None = None
    api_key: str | None = None
    probe_timeout_s: float = 5.0
    max_restart_delay_s: float = LONGEST_S
    log_format: str = "text"


def parse_servers(role: Role, texts: Sequence[str]) -> tuple[ServerConfig, ...]:
    """Servers of one role, each written `URL[,events=ADDRESS[,replay=ADDRESS]]`; raises ConfigurationError."""
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
                f"{text!r}: after the address come events=tcp://HOST:PORT and replay=tcp://HOST:PORT, "
                f"where KV events are published, not {part!r}"
            )
        addresses[name] = address
    if "replay" in addresses and "events" not in addresses:
        raise ConfigurationError(f"{text!r}: replay is for a server with events: give its events too")
    return ServerConfig(
        instance=instance,
        role=role,
        url=root,
        events=addresses.get("events"),
        replay=addresses.get("replay"),
    )
