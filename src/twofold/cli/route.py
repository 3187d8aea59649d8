"""`twofold route`: the gateway in front of vLLM servers that somebody else started."""

from pathlib import Path
from typing import Annotated

import typer

_SERVERS = "Servers"
_HTTP = "HTTP"
_LIMITS = "Limits"
_TELEMETRY = "Telemetry"

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
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_HTTP)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.", rich_help_panel=_HTTP)
    ] = 8000,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name in the API (the directory's or the id).", rich_help_panel=_HTTP)
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="TWOFOLD_API_KEY",
            show_envvar=True,
            help="Ask clients for a key; may be given several times.",
            rich_help_panel=_HTTP,
        ),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            help="File of keys: name key [max_concurrent] [requests_per_minute].", rich_help_panel=_HTTP
        ),
    ] = None,
    allow_anonymous: Annotated[
        bool,
        typer.Option("--allow-anonymous", help="Let other machines in without a key.", rich_help_panel=_HTTP),
    ] = False,
    max_running: Annotated[
        int, typer.Option(min=1, help="Requests on the servers at once.", rich_help_panel=_LIMITS)
    ] = 1024,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Requests that may wait for that.", rich_help_panel=_LIMITS)
    ] = 1024,
    overload: Annotated[str | None, typer.Option(help=_OVERLOAD, rich_help_panel=_LIMITS)] = None,
    request_timeout: Annotated[
        float,
        typer.Option(min=0.001, help="Seconds for a request that names none.", rich_help_panel=_LIMITS),
    ] = 1800.0,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest prompt (as the context allows).", rich_help_panel=_LIMITS),
    ] = None,
    max_body_bytes: Annotated[
        str, typer.Option(help="Largest request body, as in 32MiB.", rich_help_panel=_LIMITS)
    ] = "32MiB",
    slo: Annotated[
        str | None,
        typer.Option(help="What counts as good, as in ttft=2,tpot=0.1 (s).", rich_help_panel=_TELEMETRY),
    ] = None,
    log_format: Annotated[
        str, typer.Option(help="text, or json: with a line per request.", rich_help_panel=_TELEMETRY)
    ] = "text",
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
            help="Send traces to this OTLP/HTTP collector.",
            rich_help_panel=_TELEMETRY,
        ),
    ] = None,
) -> None:
    """Put the OpenAI API of Twofold in front of vLLM servers.

    Prompts are computed on `--prefill` servers and output on `--decode` servers, between which vLLM's NixlConnector
    moves the KV cache; `--colocated` servers do both. Nothing is installed on them. Where they ask for an API key,
    TWOFOLD_SERVER_API_KEY has it.
    """
    from twofold.cli import route_run  # noqa: PLC0415 (what it needs is too heavy for the start of every command)
    from twofold.cli.serve import parse_size  # noqa: PLC0415

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
    http = route_run.HttpConfig(
        served_model_name=served_model_name or route_run.public_name(model),
        keys=keys,
        limits=route_run.Limits(
            body_bytes=parse_size(max_body_bytes, "--max-body-bytes"),
            generations=min(route_run.Limits().generations, max_running + max_waiting),
            prompt_tokens=max_prompt_tokens,
            timeout_s=request_timeout,
        ),
        admission=route_run.AdmissionLimits(
            max_running=max_running,
            max_waiting=max_waiting,
            timeout_s=request_timeout,
            keys={} if keys is None else keys.limits,
        ),
    )
    telemetry = route_run.telemetry_config(slo, otlp_endpoint)
    route_run.run(config, http, telemetry, host=host, port=port, allow_anonymous=allow_anonymous)
