"""Implementation of `twofold route`: configure and run the gateway."""

import os
from pathlib import Path
from typing import Final

from twofold.cli.serve.http import find_keys, http_config, listen, serve, start_telemetry
from twofold.cli.serve.route_settings import RouteSettings
from twofold.errors import ConfigurationError, require
from twofold.hardware.architectures import ConfigJson
from twofold.instance import Role
from twofold.scheduling.routers import FORECASTING_ROUTERS, ROUTERS
from twofold.serving.launch.model_source import find_model
from twofold.serving.upstream.config import RouteConfig, parse_servers
from twofold.serving.upstream.service import RoutedGateway

USUAL_CONTEXT: Final = 8192  # tokens
SERVER_KEY_VARIABLE: Final = "TWOFOLD_SERVER_API_KEY"


def run(settings: RouteSettings) -> None:
    """Run the gateway until Ctrl-C or SIGTERM. Raises ConfigurationError for invalid flags."""
    keys = find_keys(settings)
    config = route_config(settings)
    name = settings.served_model_name or public_name(settings.model)
    http = http_config(settings, name, keys, settings.gateway_processes)
    telemetry = start_telemetry(settings, http.served_model_name)
    listener = listen(settings, keys)
    serve(lambda on_progress: RoutedGateway(config, http, listener, on_progress, telemetry), config.log_format)


def route_config(settings: RouteSettings) -> RouteConfig:
    """Convert the flags to a gateway configuration. Raises ConfigurationError or ModelError for invalid flags."""
    servers = (
        *parse_servers(Role.PREFILL, settings.prefill),
        *parse_servers(Role.DECODE, settings.decode),
        *parse_servers(Role.MIXED, settings.colocated),
    )
    if bool(settings.prefill) != bool(settings.decode) or not servers:
        raise ConfigurationError(
            "a phase has no server: give --prefill URL and --decode URL, or --colocated URL, or all three"
        )
    urls = [server.url for server in servers]
    twice = next((url for url in urls if urls.count(url) > 1), None)
    require(twice is None, f"{twice} is given twice: use --colocated for a server that runs both phases")
    silent = [each.url for each in servers if each.role is not Role.DECODE and each.events is None]
    if ROUTERS[settings.router].kind.reads_prefix_caches and silent:
        raise ConfigurationError(
            f"--router {settings.router} needs the KV events of each server that prefills: give the address, as in "
            f"{silent[0]},events=tcp://HOST:5557"
        )
    early_ttft_s = _early_ttft_s(settings)
    model = find_model(settings.model)
    described = ConfigJson(model, part="text_config")
    return RouteConfig(
        model=str(model),
        vocab_size=described.number("vocab_size"),
        context=described.number("max_position_embeddings", default=USUAL_CONTEXT),
        servers=servers,
        router=settings.router,
        early_ttft_s=early_ttft_s,
        api_key=os.environ.pop(SERVER_KEY_VARIABLE, None) or None,
        probe_timeout_s=settings.probe_timeout,
        max_restart_delay_s=settings.max_restart_delay,
        log_format=settings.log_format,
    )


def _early_ttft_s(settings: RouteSettings) -> float | None:
    if settings.overload in (None, "none"):
        return None
    if settings.router not in FORECASTING_ROUTERS:
        raise ConfigurationError(
            f"--overload early needs a router that predicts the TTFT, and --router {settings.router} does not: "
            f"use one of {', '.join(FORECASTING_ROUTERS)}"
        )
    ttft_s = None if settings.slo is None else settings.slo.ttft_s
    if ttft_s is None:
        raise ConfigurationError("--overload early needs --slo with a TTFT, as in ttft=2")
    return ttft_s


def public_name(model: str) -> str:
    """Return the model's name in the API: the name of its directory, else its hub id."""
    return Path(model).resolve().name if Path(model).is_dir() else model
