"""`twofold route`: the gateway in front of vLLM servers that somebody else started."""

from typing import Annotated

import typer

from twofold.cli.http_flags import (
    LIMITS,
    AllowAnonymous,
    ApiKey,
    ApiKeys,
    Host,
    LogFormat,
    MaxBodyBytes,
    MaxPromptTokens,
    MaxWaiting,
    OtlpEndpoint,
    Port,
    RequestTimeout,
    ServedModelName,
    SloText,
)

_SERVERS = "Servers"

_MODEL = "Directory of the servers' model, or its hub id: for its tokenizer, chat template and vocabulary."
_PREFILL = "A server that prefills: its address, and where it publishes KV events (once for each)."
_DECODE = "A server that decodes, likewise."
_COLOCATED = "A server that does both phases, likewise."
_ROUTER = (
    "Placement: jsq, jsq-pending, jsq-requests, round-robin, random; load, by predicted queues; conductor, also by "
    "prefix caches, whose KV events it needs; splitwise and jsq-planned, by which servers change roles, so that each "
    "must have kv_role kv_both."
)
_OVERLOAD = "early: refuse at once whose first token is predicted later than --slo (a router that predicts)."
_PROBE = "Seconds that a server may be silent before its requests go elsewhere."
_DELAY = "Seconds until a server that keeps failing is tried again, at most."


def route(
    model: Annotated[str, typer.Option(help=_MODEL, show_default=False)],
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="URL[,events=ADDR]", help=_PREFILL, rich_help_panel=_SERVERS)
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL[,events=ADDR]", help=_DECODE, rich_help_panel=_SERVERS)
    ] = None,
    colocated: Annotated[
        list[str] | None, typer.Option(metavar="URL[,events=ADDR]", help=_COLOCATED, rich_help_panel=_SERVERS)
    ] = None,
    router: Annotated[str, typer.Option(help=_ROUTER, rich_help_panel=_SERVERS)] = "jsq",
    probe_timeout: Annotated[float, typer.Option(min=0.1, help=_PROBE, rich_help_panel=_SERVERS)] = 5.0,
    max_restart_delay: Annotated[float, typer.Option(min=0.1, help=_DELAY, rich_help_panel=_SERVERS)] = 30.0,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedModelName = None,
    api_key: ApiKey = None,
    api_keys: ApiKeys = None,
    allow_anonymous: AllowAnonymous = False,
    max_running: Annotated[
        int, typer.Option(min=1, help="Requests on the servers at once.", rich_help_panel=LIMITS)
    ] = 1024,
    max_waiting: MaxWaiting = 1024,
    overload: Annotated[str | None, typer.Option(help=_OVERLOAD, rich_help_panel=LIMITS)] = None,
    request_timeout: RequestTimeout = 1800.0,
    max_prompt_tokens: MaxPromptTokens = None,
    max_body_bytes: MaxBodyBytes = "32MiB",
    slo: SloText = None,
    log_format: LogFormat = "text",
    otlp_endpoint: OtlpEndpoint = None,
) -> None:
    """Put the OpenAI API of Twofold in front of vLLM servers.

    Prompts are computed on `--prefill` servers and output on `--decode` servers, between which vLLM's NixlConnector
    moves the KV cache; `--colocated` servers do both. Nothing is installed on them. Where they ask for an API key,
    TWOFOLD_SERVER_API_KEY has it.
    """
    # What these need is too heavy for the start of every command.
    from twofold.cli import http as http_run  # noqa: PLC0415
    from twofold.cli import route_run  # noqa: PLC0415

    keys = route_run.find_keys(api_key, api_keys)
    flags = route_run.Flags(
        model=model,
        prefill=tuple(prefill or ()),
        decode=tuple(decode or ()),
        colocated=tuple(colocated or ()),
        router=router,
        overload=overload,
        slo=slo,
        probe_timeout_s=probe_timeout,
        max_restart_delay_s=max_restart_delay,
        log_format=log_format,
    )
    config = route_run.config_of(flags)
    http = http_run.http_config(
        served_model_name or route_run.public_name(model),
        keys,
        max_running=max_running,
        max_waiting=max_waiting,
        request_timeout=request_timeout,
        max_prompt_tokens=max_prompt_tokens,
        max_body_bytes=max_body_bytes,
    )
    telemetry = http_run.telemetry_config(slo, otlp_endpoint)
    route_run.run(config, http, telemetry, host=host, port=port, allow_anonymous=allow_anonymous)
