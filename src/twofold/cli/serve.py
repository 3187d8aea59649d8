"""`twofold serve`: a model behind the OpenAI API, split into two phases or colocated."""

from pathlib import Path
from typing import Annotated, Literal

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
from twofold.cli.sizes import parse_size
from twofold.errors import ConfigurationError

_SERVICE = "Service"
_ENGINE = "Engine"
_HOSTS = "Other hosts"
_RAY = "Ray"
_PARALLEL = "Parallelism within a worker"

_MODEL = "Model directory, or hub id; none with --engine emulated, whose --cluster names it."
_CLUSTER = "Take pools and policies from this file, as `twofold plan --output` writes it."
_CATALOG = "A file with more machines or models for --cluster (TOML)."
_ROUTER = (
    "Placement: jsq, jsq-pending, jsq-requests, two-choices, round-robin, random, cells:jsq (jsq); by predicted times:"
    " load, local-prefix, conductor; with jsq-planned roles may be changed, splitwise also does so by itself."
)
_HANDOFF = "How KV travels: layer-wise, serialized, pull, by-size, auto (layer-wise)."
_TRANSPORT = (
    "What moves KV: shared_memory, curve, nixl, mooncake (shared_memory; curve with --listen-workers)."
)
_REPLAN = "Watch the traffic, and let workers change roles when it shifts; needs --slo."
_PROFILE = (
    "How fast workers are here, as `twofold calibrate live` wrote it: for flags that go by expected times."
)
_INLINE = "Let whole prompts join decodes while an iteration is expected to take at most so many seconds (colocated)."
_OVERLOAD = (
    "Refuse at once what would miss --slo: baseline, early or predicted; none only watches (no control)."
)
_ATTAINMENT = "Share of requests within --slo that --replan aims at (0.9)."
_RETIRE = "Let --replan also end workers that are not needed, and start them again."
_LISTEN = "Take workers from other hosts at this address of ours, as in tcp://10.0.0.1:7600."
_KEY = "File of the key that they need, as `twofold keygen` writes it."
_LAUNCHER = (
    "Who starts the workers: local (processes of this host) or ray (actors on the nodes of a Ray cluster)."
)
_RAY_ADDRESS = "The Ray cluster: auto (the one that this host is part of), or HOST:PORT of its head (auto)."
_RAY_RESOURCES = "What each worker takes of a node, as in CPU=4,GPU=1 (CPU=1, and GPU=1 with --device cuda)."
_RAY_LINK = "Nodes with the same value of this label share a fast link (ray.io/gpu-domain)."
_TP = "Ranks that share the heads of each layer: tensor parallelism (1)."
_PP = "Stages that divide the layers: pipeline parallelism (1)."
_CHUNK = (
    "Prompts of more tokens go through the stages of prefill workers in chunks, one on each at the same time."
)
_ENGINES = "torch; vllm; or emulated: takes its times from a performance model of the machines in --cluster."
_BUDGET = (
    "Tokens in an iteration; auto: as many prompt tokens as keep it busy (2048; 512 with chunked prefill)."
)
_SWAP = "Host memory of a decoding worker to swap to, as in 4GiB: outputs then take KV cache as they grow."
_PREFIXES = "Keep the KV of prompts while there is room, for prompts that begin alike (yes; no if emulated)."
_RETENTION = "Longest that a request may have its prompt kept, in seconds; 0: not at all."
_RETENTION_SHARE = "Share of the KV memory that prompts so kept may take (0.25)."
_EVICTION = "Which KV of prompts goes first when memory is wanted: lru, lfu or length-aware (lru)."
_STORE_DRAM = "Memory of the host that keeps KV of prompts for all of its workers, as in 4GiB."
_STORE_DISK = "A directory below that, and how much of its disk, as in /var/kv:100GiB."
_TOKENIZER = "Directory of the tokenizer (the model's); an emulated model has none of its own."


def serve(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL, show_default=False)] = None,
    prefill: Annotated[
        int | None, typer.Option(min=0, help="Prefill workers (1).", rich_help_panel=_SERVICE)
    ] = None,
    decode: Annotated[
        int | None, typer.Option(min=0, help="Decode workers (1).", rich_help_panel=_SERVICE)
    ] = None,
    colocated: Annotated[
        int | None,
        typer.Option(min=0, help="Workers that do both phases, instead of split.", rich_help_panel=_SERVICE),
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help=_CLUSTER, rich_help_panel=_SERVICE)] = None,
    catalog: Annotated[list[Path] | None, typer.Option(help=_CATALOG, rich_help_panel=_SERVICE)] = None,
    router: Annotated[str | None, typer.Option(help=_ROUTER, rich_help_panel=_SERVICE)] = None,
    handoff: Annotated[str | None, typer.Option(help=_HANDOFF, rich_help_panel=_SERVICE)] = None,
    transport: Annotated[str | None, typer.Option(help=_TRANSPORT, rich_help_panel=_SERVICE)] = None,
    kv_checksums: Annotated[
        bool, typer.Option(help="Compare checksums of all KV that travels.", rich_help_panel=_SERVICE)
    ] = False,
    pin_cores: Annotated[
        bool | None,
        typer.Option(help="Give each worker cores of its own (if it computes).", rich_help_panel=_SERVICE),
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help=_TP, rich_help_panel=_PARALLEL)] = None,
    pp: Annotated[int | None, typer.Option(min=1, help=_PP, rich_help_panel=_PARALLEL)] = None,
    prefill_tp: Annotated[
        int | None, typer.Option(min=1, help="The same for prefill workers.", rich_help_panel=_PARALLEL)
    ] = None,
    prefill_pp: Annotated[
        int | None, typer.Option(min=1, help="The same for prefill workers.", rich_help_panel=_PARALLEL)
    ] = None,
    decode_tp: Annotated[
        int | None, typer.Option(min=1, help="The same for decode workers.", rich_help_panel=_PARALLEL)
    ] = None,
    decode_pp: Annotated[
        int | None, typer.Option(min=1, help="The same for decode workers.", rich_help_panel=_PARALLEL)
    ] = None,
    pipeline_chunk: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help=_CHUNK, rich_help_panel=_PARALLEL)
    ] = None,
    listen_workers: Annotated[str | None, typer.Option(help=_LISTEN, rich_help_panel=_HOSTS)] = None,
    cluster_key: Annotated[Path | None, typer.Option(help=_KEY, rich_help_panel=_HOSTS)] = None,
    launcher: Annotated[str, typer.Option(help=_LAUNCHER, rich_help_panel=_RAY)] = "local",
    ray_address: Annotated[str | None, typer.Option(help=_RAY_ADDRESS, rich_help_panel=_RAY)] = None,
    ray_resources: Annotated[str | None, typer.Option(help=_RAY_RESOURCES, rich_help_panel=_RAY)] = None,
    ray_link_label: Annotated[str | None, typer.Option(help=_RAY_LINK, rich_help_panel=_RAY)] = None,
    journal: Annotated[
        Path | None,
        typer.Option(help="Write every scheduling decision to this directory.", rich_help_panel=_SERVICE),
    ] = None,
    max_restart_delay: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Seconds until a worker that keeps failing is started again, at most.",
            rich_help_panel=_SERVICE,
        ),
    ] = 30.0,
    replan: Annotated[bool, typer.Option("--replan", help=_REPLAN, rich_help_panel=_SERVICE)] = False,
    profile: Annotated[Path | None, typer.Option(help=_PROFILE, rich_help_panel=_SERVICE)] = None,
    attainment: Annotated[float | None, typer.Option(help=_ATTAINMENT, rich_help_panel=_SERVICE)] = None,
    retire: Annotated[bool, typer.Option("--retire", help=_RETIRE, rich_help_panel=_SERVICE)] = False,
    min_between: Annotated[
        float | None,
        typer.Option(
            min=1.0, help="Seconds between two decisions of --replan (60).", rich_help_panel=_SERVICE
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help=_ENGINES, rich_help_panel=_ENGINE)] = "torch",
    dtype: Annotated[
        str | None,
        typer.Option(help="auto, float32, bfloat16 or float16 (auto).", rich_help_panel=_ENGINE),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:0 … (cpu).", rich_help_panel=_ENGINE)
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a KV block (16).", rich_help_panel=_ENGINE)
    ] = None,
    kv_cache_memory_bytes: Annotated[
        str | None,
        typer.Option(help="KV cache of each worker, as in 500M (1GiB).", rich_help_panel=_ENGINE),
    ] = None,
    swap_space: Annotated[str | None, typer.Option(help=_SWAP, rich_help_panel=_ENGINE)] = None,
    prefix_caching: Annotated[
        bool | None,
        typer.Option("--prefix-caching/--no-prefix-caching", help=_PREFIXES, rich_help_panel=_ENGINE),
    ] = None,
    cache_retention_share: Annotated[
        float | None, typer.Option(min=0, max=1, help=_RETENTION_SHARE, rich_help_panel=_ENGINE)
    ] = None,
    kv_eviction: Annotated[str | None, typer.Option(help=_EVICTION, rich_help_panel=_ENGINE)] = None,
    kv_store_dram: Annotated[str | None, typer.Option(help=_STORE_DRAM, rich_help_panel=_ENGINE)] = None,
    kv_store_disk: Annotated[str | None, typer.Option(help=_STORE_DISK, rich_help_panel=_ENGINE)] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=2, help="Longest prompt plus output (the model's).", rich_help_panel=_ENGINE),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences in an iteration at most (64).", rich_help_panel=_ENGINE),
    ] = None,
    max_num_batched_tokens: Annotated[
        str | None, typer.Option(metavar="TOKENS", help=_BUDGET, rich_help_panel=_ENGINE)
    ] = None,
    enable_chunked_prefill: Annotated[
        bool | None,
        typer.Option(help="Cut prompts into chunks (colocated workers only).", rich_help_panel=_ENGINE),
    ] = None,
    inline_tbt: Annotated[
        float | None, typer.Option(min=0.0, metavar="SECONDS", help=_INLINE, rich_help_panel=_ENGINE)
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help=_TOKENIZER, rich_help_panel=_ENGINE)] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=2, help="Tokens that an emulated model knows.", rich_help_panel=_ENGINE)
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedModelName = None,
    api_key: ApiKey = None,
    slo: SloText = None,
    log_format: LogFormat = "text",
    otlp_endpoint: OtlpEndpoint = None,
    api_keys: ApiKeys = None,
    allow_anonymous: AllowAnonymous = False,
    max_running: Annotated[
        int, typer.Option(min=1, help="Requests in the workers at once.", rich_help_panel=LIMITS)
    ] = 1024,
    max_waiting: MaxWaiting = 1024,
    overload: Annotated[str | None, typer.Option(help=_OVERLOAD, rich_help_panel=LIMITS)] = None,
    request_timeout: RequestTimeout = 1800.0,
    max_prompt_tokens: MaxPromptTokens = None,
    cache_retention: Annotated[float, typer.Option(min=0, help=_RETENTION, rich_help_panel=LIMITS)] = 3600.0,
    max_body_bytes: MaxBodyBytes = "32MiB",
) -> None:
    """Serve MODEL behind the OpenAI API.

    Prefill and decode run in separate workers, and the KV cache travels from one to the other layer by layer
    while it is being computed. `--colocated N` serves the same model unsplit, for comparison. With `--engine emulated
    --cluster FILE` no model runs: the service keeps the time of the machines in the file.
    """
    # What these need is too heavy for the start of every command.
    from twofold.cli import http as http_run  # noqa: PLC0415
    from twofold.cli import serve_run  # noqa: PLC0415

    for flag, value in (
        ("--attainment", attainment),
        ("--retire", retire or None),
        ("--min-between", min_between),
    ):
        if value is not None and not replan:
            raise ConfigurationError(f"{flag} is for --replan: give that too")
    keys = serve_run.find_keys(api_key, api_keys)
    size = None if kv_cache_memory_bytes is None else parse_size(kv_cache_memory_bytes)
    flags = serve_run.Flags(
        model=model,
        prefill=prefill,
        decode=decode,
        colocated=colocated,
        cluster=cluster,
        catalog=tuple(catalog or ()),
        router=router,
        tp=tp,
        pp=pp,
        prefill_tp=prefill_tp,
        prefill_pp=prefill_pp,
        decode_tp=decode_tp,
        decode_pp=decode_pp,
        pipeline_chunk=pipeline_chunk,
        handoff=handoff,
        transport=transport,
        kv_checksums=kv_checksums,
        pin_cores=pin_cores,
        listen_workers=listen_workers,
        cluster_key=cluster_key,
        ray=serve_run.ray_flags(launcher, ray_address, ray_resources, ray_link_label, device),
        journal=journal,
        max_restart_delay=max_restart_delay,
        engine=engine,
        dtype=dtype,
        device=device,
        block_size=block_size,
        kv_cache_memory_bytes=size,
        swap_space=None if swap_space is None else parse_size(swap_space, "--swap-space"),
        store=serve_run.store_config(kv_store_dram, kv_store_disk),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        prefix_caching=prefix_caching,
        cache_retention_share=cache_retention_share,
        kv_eviction=kv_eviction,
        max_num_batched_tokens=None
        if max_num_batched_tokens is None
        else parse_budget(max_num_batched_tokens),
        enable_chunked_prefill=enable_chunked_prefill,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        log_format=log_format,
        profile=profile,
        replan=serve_run.ReplanFlags(
            profile=profile, slo=slo, attainment=attainment, retire=retire, min_between_s=min_between
        )
        if replan
        else None,
        overload=None
        if overload is None
        else serve_run.OverloadFlags(rule=overload, slo=slo, profile=profile),
        inline_tbt=inline_tbt,
    )
    config = serve_run.service_of(flags)
    http = http_run.http_config(
        served_model_name or serve_run.public_name(flags, config),
        keys,
        max_running=max_running,
        max_waiting=max_waiting,
        request_timeout=request_timeout,
        max_prompt_tokens=max_prompt_tokens,
        max_body_bytes=max_body_bytes,
        cache_retention=cache_retention,
    )
    serve_run.run(
        config,
        http,
        http_run.telemetry_config(slo, otlp_endpoint),
        host=host,
        port=port,
        allow_anonymous=allow_anonymous,
        launch=serve_run.launch_of(flags),
    )


def parse_budget(text: str) -> int | Literal["auto"]:
    """Tokens, or `auto`; raises ConfigurationError on anything else."""
    if text == "auto":
        return "auto"
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise ConfigurationError(f"--max-num-batched-tokens {text!r} is not a number of tokens, nor auto")
    return int(text)
