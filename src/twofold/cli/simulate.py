"""`twofold simulate`: run a workload on a cluster that need not exist, and report what its users would feel."""

from pathlib import Path
from typing import Annotated

import typer

from twofold.cli.sizes import parse_size
from twofold.errors import ConfigurationError
from twofold.slo import parse_slo

DEFAULT_DURATION_S = 120.0

_WORKLOAD = "A named workload, such as azure-conv, or the path of a trace."
_CLUSTER = (
    "Pools as COUNTxMACHINE:ROLE, as in 35xh100:prefill,5xh100:decode; a role is prefill, decode or mixed. "
    "With @TP or @TPxPP after the machine, instances of PP pipeline stages of TP accelerators: 4xa100@2x4:prefill."
)
_CONFIG = "A file with the whole cluster (YAML or TOML); the flags below override what it says."
_MODEL = "A model of the catalog, such as bloom-176b."
_COUNT = "At most this many requests."
_DURATION = (
    f"Requests of this many seconds; {DEFAULT_DURATION_S:g} for a named workload without --num-requests."
)
_ARRIVAL = "Arrival process: trace, poisson, gamma or constant."
_PERFORMANCE = (
    "Performance model: auto, fitted, roofline, …; fitted if not given, which knows measured pairs only."
)
_CONTENTION = "Whether transfers share the link, or each has the whole of it."
_BUDGET = "Prompt tokens of an iteration, or saturating: as many as keep an instance busy; 2048 if not given."
_CHUNK = (
    "Prompts of more tokens go through prefill pools of several stages in chunks, several of them at once."
)
_SWAP = "Host memory of an instance to swap to, as in 512GB: outputs then take KV memory as they grow."
_KV_CACHE = (
    "Room of each machine that prefills for KV of prompts, as in 128GiB or '3000000 tokens', to reuse it where a trace "
    "names blocks; or dram=512GiB,disk=4TB,eviction=lfu."
)
_RULES = (
    "twofold, or splitwise-sim or distserve-published for the rules of those simulators where they differ."
)
_PROFILE = "A host that `twofold calibrate live` measured: pools of machine `host` are workers on its cores."
_FAIL = "An instance that ends, and starts again: decode-0@30+60 ends at 30 s and is back 60 s later."
_SLO = "Latency bounds in seconds, as in ttft=2,tpot=0.1; or splitwise for its nine bounds on slowdowns."
_REFERENCE = "The machine that slowdowns are multiples of; dgx-a100 if not given."
_CATALOG = "A file with more machines, models or links (TOML)."
_HTML = "Write a page of pictures here; it opens without a network."
_TABLE = "Write a row for each request here (Parquet)."
_CHROME = "Write a trace for chrome://tracing or Perfetto here."
_REPLAN = "Watch the traffic, and split the instances anew between the phases when it shifts."
_SPARE = "Machines that re-planning may start besides; with any, it also retires those that are not needed."
_OVERLOAD = (
    "Refuse requests that would miss --slo: baseline, early or predicted; none only watches the loads."
)
_CELLS = (
    "Groups that instances are divided into, each with both phases, for a router of cells, such as cells:jsq."
)
_CONTROLLERS = (
    "Controllers that requests are dealt among, each with its own view of the load; one if not given."
)
_REPORTS = (
    "Seconds between two reports of an instance's load (or a cell's), which controllers then go by; 0 is at once. "
    "0.2 if only other flags of controllers are given."
)
_DELAY = "Seconds that a report is on its way."
_OWN = (
    "What a controller knows of its own requests besides reports: followed (all, the default), sent (that it sent them "
    "since the last report) or ignored (nothing)."
)
_REPLANNING = "Re-planning"
_CONTROL = "Several controllers"


def simulate(
    workload: Annotated[str, typer.Argument(metavar="WORKLOAD", help=_WORKLOAD, show_default=False)],
    *,
    cluster: Annotated[str | None, typer.Option(help=_CLUSTER)] = None,
    config: Annotated[Path | None, typer.Option(help=_CONFIG)] = None,
    model: Annotated[str | None, typer.Option(help=_MODEL)] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", "--request-rate", help="Requests per second; a trace's own if not given."),
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option("--num-requests", "--requests", min=1, help=_COUNT)
    ] = None,
    duration: Annotated[float | None, typer.Option(help=_DURATION)] = None,
    start: Annotated[float, typer.Option(help="Begin at this second of a trace.")] = 0.0,
    arrival: Annotated[str | None, typer.Option(help=_ARRIVAL)] = None,
    burstiness: Annotated[
        float, typer.Option(help="Shape of gamma arrivals: 1 is Poisson, less is burstier.")
    ] = 1.0,
    length_scale: Annotated[float, typer.Option(help="Multiply prompt and output lengths by this.")] = 1.0,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Clip requests to this many tokens, prompt and output.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals and lengths.")] = 0,
    performance: Annotated[str | None, typer.Option(help=_PERFORMANCE)] = None,
    profile: Annotated[Path | None, typer.Option(help=_PROFILE)] = None,
    router: Annotated[str | None, typer.Option(help="Router; splitwise if not given.")] = None,
    handoff: Annotated[
        str | None, typer.Option(help="serialized, layer-wise or by-size; by-size if not given.")
    ] = None,
    max_num_batched_tokens: Annotated[str | None, typer.Option(metavar="TOKENS", help=_BUDGET)] = None,
    pipeline_chunk: Annotated[int | None, typer.Option(min=1, metavar="TOKENS", help=_CHUNK)] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Sequences of an iteration; 512 if not given.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a KV block; 16 if not given.")
    ] = None,
    swap_space: Annotated[str | None, typer.Option(help=_SWAP)] = None,
    kv_cache: Annotated[str | None, typer.Option(metavar="ROOM", help=_KV_CACHE)] = None,
    kv_bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="KV cache of a token in bytes; the model's own if not given.")
    ] = None,
    link_gb_per_s: Annotated[
        float | None, typer.Option(help="Bandwidth of hand-offs in GB/s; the machines' own if not given.")
    ] = None,
    contention: Annotated[bool | None, typer.Option("--contention/--no-contention", help=_CONTENTION)] = None,
    rules: Annotated[str | None, typer.Option(help=_RULES)] = None,
    fail: Annotated[list[str] | None, typer.Option(help=_FAIL)] = None,
    slo: Annotated[str | None, typer.Option(help=_SLO)] = None,
    attainment: Annotated[
        float, typer.Option(help="Share of requests that must be within bounds in seconds.")
    ] = 0.9,
    overload: Annotated[str | None, typer.Option(help=_OVERLOAD)] = None,
    reference: Annotated[str | None, typer.Option(metavar="MACHINE", help=_REFERENCE)] = None,
    catalog: Annotated[list[Path] | None, typer.Option(help=_CATALOG)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(help=_HTML)] = None,
    requests_table: Annotated[Path | None, typer.Option(help=_TABLE)] = None,
    chrome_trace: Annotated[Path | None, typer.Option(help=_CHROME)] = None,
    event_log: Annotated[
        Path | None, typer.Option(help="Write a line for each thing that happened here (JSON lines).")
    ] = None,
    replan: Annotated[bool, typer.Option("--replan", help=_REPLAN, rich_help_panel=_REPLANNING)] = False,
    spare: Annotated[int, typer.Option(min=0, max=1000, help=_SPARE, rich_help_panel=_REPLANNING)] = 0,
    search_time: Annotated[
        float, typer.Option(help="Simulated seconds that a search takes.", rich_help_panel=_REPLANNING)
    ] = 5.0,
    start_up_time: Annotated[
        float, typer.Option(help="Seconds that a machine takes to start.", rich_help_panel=_REPLANNING)
    ] = 30.0,
    min_gain: Annotated[
        float, typer.Option(help="Share of requests that a move must bring.", rich_help_panel=_REPLANNING)
    ] = 0.05,
    min_between: Annotated[
        float, typer.Option(help="Seconds between two decisions.", rich_help_panel=_REPLANNING)
    ] = 60.0,
    cells: Annotated[int | None, typer.Option(min=1, help=_CELLS, rich_help_panel=_CONTROL)] = None,
    controllers: Annotated[
        int | None, typer.Option(min=1, help=_CONTROLLERS, rich_help_panel=_CONTROL)
    ] = None,
    reports_every: Annotated[
        float | None, typer.Option(metavar="SECONDS", help=_REPORTS, rich_help_panel=_CONTROL)
    ] = None,
    report_delay: Annotated[
        float | None, typer.Option(metavar="SECONDS", help=_DELAY, rich_help_panel=_CONTROL)
    ] = None,
    own_load: Annotated[str | None, typer.Option(metavar="WHAT", help=_OWN, rich_help_panel=_CONTROL)] = None,
) -> None:
    """Simulate a workload on a cluster: latency, throughput, energy, cost, and whether an SLO is met.

    Times come from a performance model; every number that rests on one shows how far that model was from
    measurements it had not seen.
    """
    bounds = None if slo is None else parse_slo(slo)
    _require_share(attainment)
    # These are too heavy for the start of every command.
    from twofold.cli import simulate_run, simulate_spec  # noqa: PLC0415
    from twofold.cli.simulate_control import ControlFlags  # noqa: PLC0415
    from twofold.cli.simulate_files import Files  # noqa: PLC0415
    from twofold.cli.simulate_replan import Replan  # noqa: PLC0415
    from twofold.cli.simulate_source import Source  # noqa: PLC0415
    from twofold.cluster.spec import parse_cache  # noqa: PLC0415
    from twofold.hardware.catalog import load_catalog  # noqa: PLC0415

    known, model = simulate_spec.with_host(load_catalog(catalog or []), model, profile)
    spec = simulate_spec.read_spec(
        cluster,
        config,
        known,
        model=model,
        profile=None if profile is None else str(profile),
        performance=performance,
        router=router,
        handoff=handoff,
        max_num_batched_tokens=None
        if max_num_batched_tokens is None
        else simulate_spec.parse_token_budget(max_num_batched_tokens),
        pipeline_chunk=pipeline_chunk,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        swap_space_bytes=None if swap_space is None else parse_size(swap_space, "--swap-space"),
        kv_cache=None if kv_cache is None else parse_cache(kv_cache),
        cells=cells,
        kv_bytes_per_token=kv_bytes_per_token,
        link_gb_per_s=link_gb_per_s,
        contention=contention,
        rules=rules,
        failures=fail or [],
    )
    spec = ControlFlags(controllers, reports_every, report_delay, own_load).given_to(spec)
    source = Source(
        workload=workload,
        rate=rate,
        num_requests=num_requests,
        duration_s=duration,
        start_s=start,
        arrival=arrival,
        burstiness=burstiness,
        length_scale=length_scale,
        max_model_len=max_model_len,
        seed=seed,
    )
    replanning = Replan(
        spare=spare,
        search_s=search_time,
        start_up_s=start_up_time,
        min_gain=min_gain,
        min_between_s=min_between,
    )
    replanning.require_sensible()
    if spare and not replan:
        raise ConfigurationError(f"--spare {spare} is for --replan, which starts them: give that too")
    simulate_run.run(
        replanning.with_spare(spec) if replan else spec,
        source,
        known,
        slo=bounds,
        attainment=attainment,
        reference=reference,
        overload=overload,
        as_json=as_json,
        files=Files(html=html, requests_table=requests_table, chrome_trace=chrome_trace, event_log=event_log),
        inputs=[path for path in (config, profile, *(catalog or [])) if path is not None],
        replan=replanning if replan else None,
    )


def _require_share(attainment: float) -> None:
    if not 0.0 < attainment <= 1.0:
        raise ConfigurationError(f"--attainment {attainment:g} is no share: give more than 0, at most 1")
