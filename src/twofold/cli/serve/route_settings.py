"""Flags of `twofold route`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from twofold.cli.options import HttpSettings, LimitSettings, TelemetrySettings
from twofold.cli.settings import Flag, Settings
from twofold.scheduling.routers import LIVE_ROUTERS, ROUTERS

OVERLOAD_RULES: Final = {
    "none": "Reject nothing.",
    "early": "Reject a request whose predicted TTFT exceeds --slo; needs a router that predicts.",
}
_URL: Final = "URL[,events=ADDRESS]"


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Settings):
    """The servers, and how requests are placed on them."""

    PANEL: ClassVar = "Servers"

    model: Annotated[
        str, Flag("Model directory or hub id, for the tokenizer, chat template and vocabulary.", metavar="MODEL")
    ]
    prefill: Annotated[
        tuple[str, ...], Flag("Prefill server, and the address of its KV events; repeatable.", metavar=_URL)
    ] = ()
    decode: Annotated[
        tuple[str, ...], Flag("Decode server, and the address of its KV events; repeatable.", metavar=_URL)
    ] = ()
    colocated: Annotated[
        tuple[str, ...],
        Flag("Server that runs both phases, and the address of its KV events; repeatable.", metavar=_URL),
    ] = ()
    router: Annotated[
        str, Flag("Router: places requests on servers.", choices={name: ROUTERS[name] for name in LIVE_ROUTERS})
    ] = "jsq"
    probe_timeout: Annotated[
        float, Flag("Seconds without an answer after which a server counts as failed.", ge=0.1)
    ] = 5.0
    max_restart_delay: Annotated[
        float, Flag("Maximum delay before a failing server is retried, in seconds.", ge=0.1)
    ] = 30.0


@dataclass(frozen=True, kw_only=True)
class RouteLimitSettings(LimitSettings):
    """Limits of the gateway and of the servers behind it."""

    PANEL: ClassVar = LimitSettings.PANEL

    overload: Annotated[
        str | None, Flag("Reject requests that are predicted to miss --slo.", choices=OVERLOAD_RULES)
    ] = None


@dataclass(frozen=True, kw_only=True)
class RouteSettings(TelemetrySettings, RouteLimitSettings, HttpSettings, ServerSettings):
    """All flags of `twofold route`."""
