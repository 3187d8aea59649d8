"""The flags of `twofold serve` and `twofold route` about HTTP; `http_run` says what they ask for."""

from pathlib import Path
from typing import Annotated

import typer

_HTTP = "HTTP"
LIMITS = "Limits"
_TELEMETRY = "Telemetry"

_KEYS_FILE = "File of keys: name key [max_concurrent] [requests_per_minute]."

Host = Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_HTTP)]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.", rich_help_panel=_HTTP)]
ServedModelName = Annotated[
    str | None, typer.Option(help="Name in the API (the directory's or the id).", rich_help_panel=_HTTP)
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        envvar="TWOFOLD_API_KEY",
        show_envvar=True,
        help="Ask clients for a key; may be given several times.",
        rich_help_panel=_HTTP,
    ),
]
ApiKeys = Annotated[Path | None, typer.Option(help=_KEYS_FILE, rich_help_panel=_HTTP)]
AllowAnonymous = Annotated[
    bool,
    typer.Option("--allow-anonymous", help="Let other machines in without a key.", rich_help_panel=_HTTP),
]

MaxWaiting = Annotated[
    int, typer.Option(min=0, help="Requests that may wait for that.", rich_help_panel=LIMITS)
]
RequestTimeout = Annotated[
    float, typer.Option(min=0.001, help="Seconds for a request that names none.", rich_help_panel=LIMITS)
]
MaxPromptTokens = Annotated[
    int | None, typer.Option(min=1, help="Longest prompt (as the context allows).", rich_help_panel=LIMITS)
]
MaxBodyBytes = Annotated[str, typer.Option(help="Largest request body, as in 32MiB.", rich_help_panel=LIMITS)]

SloText = Annotated[
    str | None,
    typer.Option(help="What counts as good, as in ttft=2,tpot=0.1 (s).", rich_help_panel=_TELEMETRY),
]
LogFormat = Annotated[
    str, typer.Option(help="text, or json: with a line per request.", rich_help_panel=_TELEMETRY)
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
        help="Send traces to this OTLP/HTTP collector.",
        rich_help_panel=_TELEMETRY,
    ),
]
