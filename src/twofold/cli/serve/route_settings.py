"""Flags of `twofold route`."""

from typing import Final

from twofold.cli.options import HttpSettings, LimitSettings, TelemetrySettings
from twofold.cli.settings import Settings, flag
from twofold.scheduling.routers import LIVE_ROUTERS, ROUTERS

OVERLOAD_RULES: Final = {
    "none": "Reject nothing.",
    "early": "Reject a request whose predicted TTFT exceeds --slo; needs a router that predicts.",
}
_URL: Final = "URL[,events=ADDRESS]"


class ServerSettings(Settings, panel="Servers"):
    """Flags for the servers and the routing of requests to them."""

    model: str = flag(
        "Model directory or hub id, for the tokenizer, chat template and vocabulary.", ..., metavar="MODEL"
    )
    prefill: tuple[str, ...] = flag("Prefill server, and the address of its KV events; repeatable.", (), metavar=_URL)
    decode: tuple[str, ...] = flag("Decode server, and the address of its KV events; repeatable.", (), metavar=_URL)
    colocated: tuple[str, ...] = flag(
        "Server that runs both phases, and the address of its KV events; repeatable.", (), metavar=_URL
    )
    router: str = flag(
        "Router: places requests on servers.", "jsq", choices={name: ROUTERS[name] for name in LIVE_ROUTERS}
    )
    probe_timeout: float = flag("Seconds without an answer after which a server counts as failed.", 5.0, ge=0.1)
    max_restart_delay: float = flag("Maximum delay before a failing server is retried, in seconds.", 30.0, ge=0.1)


class RouteLimitSettings(LimitSettings):
    """Flags that set limits of the gateway and of the servers behind it."""

    overload: str | None = flag("Reject requests that are predicted to miss --slo.", choices=OVERLOAD_RULES)


class RouteSettings(TelemetrySettings, RouteLimitSettings, HttpSettings, ServerSettings):
    """All flags of `twofold route`."""
