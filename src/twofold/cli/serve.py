"""`twofold serve`: a model behind the OpenAI API, split into two phases or colocated."""

import os
from pathlib import Path
from typing import Annotated

import typer

from twofold.errors import ConfigurationError

_SERVICE = "Service"
_ENGINE = "Engine"
_HTTP = "HTTP"
_TELEMETRY = "Telemetry"

_SIZE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model directory, or hub id.")],
    prefill: Annotated[
        int | None, typer.Option(min=0, help="Prefill workers (1).", rich_help_panel=_SERVICE)
    ] = None,
    decode: Annotated[
        int | None, typer.Option(min=0, help="Decode workers (1).", rich_help_panel=_SERVICE)
    ] = None,
    colocated: Annotated[
        int,
        typer.Option(min=0, help="Workers that do both phases, instead of split.", rich_help_panel=_SERVICE),
    ] = 0,
    router: Annotated[
        str,
        typer.Option(
            help="Placement: jsq, jsq-pending, jsq-requests, round-robin, random.",
            rich_help_panel=_SERVICE,
        ),
    ] = "jsq",
    handoff: Annotated[
        str,
        typer.Option(help="How KV travels: layer-wise, serialized, by-size.", rich_help_panel=_SERVICE),
    ] = "layer-wise",
    pin_cores: Annotated[
        bool, typer.Option(help="Give each worker cores of its own.", rich_help_panel=_SERVICE)
    ] = True,
    journal: Annotated[
        Path | None,
        typer.Option(help="Write every scheduling decision to this directory.", rich_help_panel=_SERVICE),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=_ENGINE),
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:0 …", rich_help_panel=_ENGINE)] = "cpu",
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens in a KV block.", rich_help_panel=_ENGINE)
    ] = 16,
    kv_cache_memory_bytes: Annotated[
        str,
        typer.Option(help="KV cache of each worker, as in 2GiB or 500M.", rich_help_panel=_ENGINE),
    ] = "1GiB",
    max_model_len: Annotated[
        int | None,
        typer.Option(min=2, help="Longest prompt plus output (the model's).", rich_help_panel=_ENGINE),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Sequences in an iteration at most.", rich_help_panel=_ENGINE)
    ] = 64,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens in an iteration (2048; 512 with chunked prefill).", rich_help_panel=_ENGINE
        ),
    ] = None,
    enable_chunked_prefill: Annotated[
        bool,
        typer.Option(help="Cut prompts into chunks (colocated workers only).", rich_help_panel=_ENGINE),
    ] = True,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_HTTP)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.", rich_help_panel=_HTTP)
    ] = 8000,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="Name in the API (the directory's or the id).", rich_help_panel=_HTTP),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="TWOFOLD_API_KEY", help="Ask clients for this key.", rich_help_panel=_HTTP),
    ] = None,
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
    """Serve MODEL behind the OpenAI API.

    Prefill and decode run in separate workers, and the KV cache travels from one to the other layer by layer
    while it is being computed. `--colocated N` serves the same model unsplit, for comparison.
    """
    from twofold.cli import serve_run  # noqa: PLC0415 (what it needs is too heavy for the start of every command)

    split = not colocated
    workers = serve_run.plan_workers(
        prefill=(1 if split else 0) if prefill is None else prefill,
        decode=(1 if split else 0) if decode is None else decode,
        colocated=colocated,
        chunked_prefill=enable_chunked_prefill,
        token_budget=max_num_batched_tokens,
        pin_cores=pin_cores,
    )
    source = serve_run.find_model(model)
    engine = serve_run.EngineConfig(
        model=str(source),
        dtype=dtype,
        device=device,
        block_size=block_size,
        kv_cache_bytes=parse_size(kv_cache_memory_bytes),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )
    name = served_model_name or (source.name if os.path.isdir(model) else model)  # noqa: PTH112 (a hub id is no path)
    serve_run.run(
        engine,
        workers,
        serve_run.HttpConfig(served_model_name=name, api_key=api_key),
        serve_run.telemetry_config(slo, otlp_endpoint),
        host=host,
        port=port,
        router=router,
        handoff=handoff,
        journal=journal,
        log_format=log_format,
    )


def parse_size(text: str) -> int:
    """Bytes from `1073741824`, `500M` or `2GiB`; raises ConfigurationError on anything else."""
    cleaned = text.strip().upper().removesuffix("B")
    digits = cleaned.rstrip("KMGI")
    unit = cleaned[len(digits) :]
    try:
        size = int(float(digits) * _SIZE_UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigurationError(
            f"--kv-cache-memory-bytes {text!r} is not a size: write bytes, or a number with a unit as in 2GiB or 500M"
        )
    return size
