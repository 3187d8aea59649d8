"""What `twofold route` does once its flags are read."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import uvloop

from twofold.cli.http import find_keys, listen, serve
from twofold.errors import ConfigurationError, ModelError
from twofold.instance import Role
from twofold.scheduling.routers import FORECASTING_ROUTERS, LIVE_ROUTERS
from twofold.serving.launch.local_service import HttpConfig
from twofold.serving.launch.model_source import find_model
from twofold.serving.telemetry.logs import configure_logs
from twofold.serving.telemetry.telemetry import TelemetryConfig, make_telemetry
from twofold.serving.upstream.config import RouteConfig, parse_servers
from twofold.serving.upstream.service import RoutedGateway
from twofold.slo import Slo

__all__ = ["Flags", "config_of", "find_keys", "public_name", "run"]

SERVER_KEY_VARIABLE: Final = "TWOFOLD_SERVER_API_KEY"
_BY_PREFIX: Final = ("local-prefix", "conductor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The flags of `twofold route` that say what is served, and how."""

    model: str
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    colocated: tuple[str, ...] = ()
    router: str = "jsq"
    overload: str | None = None
    slo: str | None = None
    probe_timeout_s: float = 5.0
    max_restart_delay_s: float = 30.0
    log_format: str = "text"


def config_of(flags: Flags) -> RouteConfig:
    """What the flags ask for; raises ConfigurationError, and ModelError."""
    if flags.router not in LIVE_ROUTERS:
        raise ConfigurationError(f"--router {flags.router!r} is not one of {', '.join(LIVE_ROUTERS)}")
    if flags.log_format not in ("text", "json"):
        raise ConfigurationError(f"--log-format {flags.log_format!r} is not one of text, json")
    servers = (
        *parse_servers(Role.PREFILL, flags.prefill),
        *parse_servers(Role.DECODE, flags.decode),
        *parse_servers(Role.MIXED, flags.colocated),
    )
    if bool(flags.prefill) != bool(flags.decode) or not servers:
        raise ConfigurationError(
            "one phase has no server: give --prefill URL and --decode URL, or --colocated URL, or all three"
        )
    urls = [server.url for server in servers]
    twice = next((url for url in urls if urls.count(url) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"{twice} is given twice: a server that does both phases is --colocated")
    silent = [each.url for each in servers if each.role is not Role.DECODE and each.events is None]
    if flags.router in _BY_PREFIX and silent:
        raise ConfigurationError(
            f"--router {flags.router} goes by what is in the prefix caches: say where {silent[0]} publishes KV events, "
            f"as in {silent[0]},events=tcp://HOST:5557"
        )
    early_ttft_s = _early(flags)
    model = find_model(flags.model)
    return RouteConfig(
        model=str(model),
        vocab_size=vocabulary_of(model),
        servers=servers,
        router=flags.router,
        early_ttft_s=early_ttft_s,
        api_key=os.environ.pop(SERVER_KEY_VARIABLE, None) or None,
        probe_timeout_s=flags.probe_timeout_s,
        max_restart_delay_s=flags.max_restart_delay_s,
        log_format=flags.log_format,
    )


def _early(flags: Flags) -> float | None:
    """The longest TTFT to be promised, if requests are to be refused by it."""
    if flags.overload in (None, "none"):
        return None
    if flags.overload != "early":
        raise ConfigurationError(
            f"--overload {flags.overload!r} is not one of none, early: it needs times of decodes that only workers of "
            "our own tell"
        )
    if flags.router not in FORECASTING_ROUTERS:
        raise ConfigurationError(
            f"--overload early asks the router when a first token will come, and --router {flags.router} does not "
            f"predict: take one of {', '.join(FORECASTING_ROUTERS)}"
        )
    ttft_s = None if flags.slo is None else Slo.parse(flags.slo).ttft_s
    if ttft_s is None:
        raise ConfigurationError("--overload early refuses what would miss the SLO: give --slo, as in ttft=2")
    return ttft_s


def vocabulary_of(model: Path) -> int:
    """How many tokens the model knows, from its `config.json`; raises ModelError."""
    try:
        config = json.loads((model / "config.json").read_bytes())
        size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{model}/config.json does not say how large the vocabulary is") from error
    if not isinstance(size, int) or size < 1:
        raise ModelError(f"{model}/config.json gives {size!r} as the size of the vocabulary")
    return size


def public_name(model: str) -> str:
    """The name of the model in the API: of its directory, or its id."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def run(
    config: RouteConfig,
    http: HttpConfig,
    telemetry: TelemetryConfig,
    *,
    host: str,
    port: int,
    allow_anonymous: bool,
) -> None:
    """Serve until Ctrl-C or SIGTERM; raises ConfigurationError."""
    configure_logs(config.log_format)
    observed = make_telemetry(http.served_model_name, telemetry)
    listener = listen(host, port, exposable=allow_anonymous or http.keys is not None)
    uvloop.run(serve(lambda said: RoutedGateway(config, http, listener, said, observed), config.log_format))
