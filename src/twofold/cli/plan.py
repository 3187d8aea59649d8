"""`twofold plan`: find the machines for a workload, split or not, by simulation."""

from pathlib import Path
from typing import Annotated

import typer

from twofold.errors import ConfigurationError
from twofold.slo import parse_slo

# Requests of a simulation. Goodput is a comparison of single instances, whose rates are low: that takes more of them.
_FEWEST, _FEWEST_FOR_GOODPUT = 500, 2000
DEFAULT_STORE = Path(".twofold/plan.sqlite")

_WHAT, _CAPACITY, _MACHINES, _WORKLOAD, _CLUSTER, _RUN, _OUTPUT = (
    "Objective",
    "KV capacity",
    "Machines",
    "Workload",
    "Cluster",
    "Running",
    "Output",
)
_HELP_WORKLOAD = "A named workload, such as azure-conv, or the path of a trace."
_HELP_OBJECTIVE = (
    "throughput (most requests/s within a budget), cost or power (least for --rate), or goodput (most requests/s of "
    "each accelerator, with parallelism of its own for each phase)."
)
_HELP_CAPACITY = (
    "Plan KV caches instead: for a trace with block ids, hit rate and saved GPU time at every capacity of DRAM and "
    "disk, with its price."
)
_HELP_NODES = "Machines that prefill; as many as the trace keeps busy without reuse."
_HELP_DRAM = "GB of DRAM of each node in front of the disk; as much as pays."
_HELP_PRICE = "Dollars of a GB for an hour; that of the catalog."
_HELP_GPUS = (
    "For goodput: how many accelerators, as in 8 of the one kind in --machines; or a stock, a100=8,h100=16."
)
_HELP_STAGES = "For goodput: no pipelines of more stages than this, which makes a search much quicker."
_HELP_AFFINITY = (
    "For goodput, whether KV caches may cross nodes: high (yes), low (no), or auto, by the links."
)
_HELP_SLO = "Latency bounds in seconds, as in ttft=2,tpot=0.1; or splitwise for its nine bounds on slowdowns."
_HELP_FAMILY = (
    "PREFILL+DECODE machines, as in h100+a100, or AA, HH, HA, HHcap; several by commas. All four if none."
)
_HELP_MOST = "At most this many machines in all, or of a kind, as in 40 or a100=30,h100=20."
_HELP_DURATION = "Seconds of arrivals that each simulation has; more where they bring too few requests."
_HELP_FEWEST = f"Requests that each simulation has at least; {_FEWEST}, or {_FEWEST_FOR_GOODPUT} for goodput."
_HELP_RAY = "Simulate on this Ray cluster, and plan for its machines where no flag says which there are."
_HELP_STORE = (
    "Where finished simulations are kept: the same plan again, or one interrupted, goes on from there."
)


def plan(
    workload: Annotated[str, typer.Argument(metavar="WORKLOAD", help=_HELP_WORKLOAD, show_default=False)],
    model: Annotated[
        str, typer.Option(help="A model of the catalog, such as bloom-176b.", rich_help_panel=_WHAT)
    ],
    objective: Annotated[str, typer.Option(help=_HELP_OBJECTIVE, rich_help_panel=_WHAT)] = "throughput",
    slo: Annotated[str, typer.Option(help=_HELP_SLO, rich_help_panel=_WHAT)] = "splitwise",
    attainment: Annotated[
        float,
        typer.Option(help="Share of requests that must be within bounds in seconds.", rich_help_panel=_WHAT),
    ] = 0.9,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", "--request-rate", help="Requests per second to plan for.", rich_help_panel=_WHAT
        ),
    ] = None,
    reference: Annotated[
        str,
        typer.Option(metavar="MACHINE", help="What slowdowns are multiples of.", rich_help_panel=_WHAT),
    ] = "dgx-a100",
    tolerance: Annotated[
        float, typer.Option(help="How near the highest rates are found, as a share.", rich_help_panel=_WHAT)
    ] = 0.02,
    kv_capacity: Annotated[
        bool, typer.Option("--kv-capacity", help=_HELP_CAPACITY, rich_help_panel=_CAPACITY)
    ] = False,
    nodes: Annotated[int | None, typer.Option(min=1, help=_HELP_NODES, rich_help_panel=_CAPACITY)] = None,
    dram_gb: Annotated[float | None, typer.Option(help=_HELP_DRAM, rich_help_panel=_CAPACITY)] = None,
    dram_price: Annotated[float | None, typer.Option(help=_HELP_PRICE, rich_help_panel=_CAPACITY)] = None,
    disk_price: Annotated[float | None, typer.Option(help=_HELP_PRICE, rich_help_panel=_CAPACITY)] = None,
    family: Annotated[list[str] | None, typer.Option(help=_HELP_FAMILY, rich_help_panel=_MACHINES)] = None,
    machines: Annotated[
        str | None,
        typer.Option(help="Machines by commas: all pairs of them are looked at.", rich_help_panel=_MACHINES),
    ] = None,
    split: Annotated[
        bool, typer.Option(help="Whether to look at split designs.", rich_help_panel=_MACHINES)
    ] = True,
    colocated: Annotated[
        bool,
        typer.Option(help="Whether to look at colocated designs, to compare.", rich_help_panel=_MACHINES),
    ] = True,
    max_machines: Annotated[str | None, typer.Option(help=_HELP_MOST, rich_help_panel=_MACHINES)] = None,
    max_cost: Annotated[
        float | None, typer.Option(help="At most this many dollars per hour.", rich_help_panel=_MACHINES)
    ] = None,
    max_power: Annotated[
        float | None, typer.Option(help="At most this many provisioned kW.", rich_help_panel=_MACHINES)
    ] = None,
    max_gpus: Annotated[str | None, typer.Option(help=_HELP_GPUS, rich_help_panel=_MACHINES)] = None,
    max_pipeline: Annotated[
        int | None, typer.Option(min=1, help=_HELP_STAGES, rich_help_panel=_MACHINES)
    ] = None,
    affinity: Annotated[str, typer.Option(help=_HELP_AFFINITY, rich_help_panel=_MACHINES)] = "auto",
    catalog: Annotated[
        list[Path] | None,
        typer.Option(help="A file with more machines or models (TOML).", rich_help_panel=_MACHINES),
    ] = None,
    duration: Annotated[float, typer.Option(help=_HELP_DURATION, rich_help_panel=_WORKLOAD)] = 120.0,
    min_requests: Annotated[
        int | None, typer.Option(min=1, help=_HELP_FEWEST, rich_help_panel=_WORKLOAD)
    ] = None,
    start: Annotated[
        float, typer.Option(help="Begin at this second of a trace.", rich_help_panel=_WORKLOAD)
    ] = 0.0,
    arrival: Annotated[
        str | None,
        typer.Option(help="Arrival process: trace, poisson, gamma or constant.", rich_help_panel=_WORKLOAD),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of gamma arrivals: 1 is Poisson, less is burstier.", rich_help_panel=_WORKLOAD
        ),
    ] = 1.0,
    length_scale: Annotated[
        float, typer.Option(help="Multiply prompt and output lengths by this.", rich_help_panel=_WORKLOAD)
    ] = 1.0,
    max_model_len: Annotated[
        int | None,
        typer.Option(min=2, help="Clip requests to this many tokens in all.", rich_help_panel=_WORKLOAD),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(min=0, help="Seed of arrivals and lengths, at all rates.", rich_help_panel=_WORKLOAD),
    ] = 0,
    performance: Annotated[
        str, typer.Option(help="Performance model: auto, fitted, roofline, …", rich_help_panel=_CLUSTER)
    ] = "auto",
    router: Annotated[
        str | None,
        typer.Option(
            help="Router of split designs: splitwise, or jsq for goodput, whose phases stay apart.",
            rich_help_panel=_CLUSTER,
        ),
    ] = None,
    handoff: Annotated[
        str, typer.Option(help="serialized, layer-wise or by-size.", rich_help_panel=_CLUSTER)
    ] = "by-size",
    tensor_parallel: Annotated[
        int | None,
        typer.Option(min=1, help="Accelerators of an instance; all of a machine.", rich_help_panel=_CLUSTER),
    ] = None,
    link_gb_per_s: Annotated[
        float | None,
        typer.Option(
            help="Bandwidth of hand-offs in GB/s; the machines' own if none.", rich_help_panel=_CLUSTER
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt tokens of an iteration.", rich_help_panel=_CLUSTER)
    ] = 2048,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Sequences of an iteration.", rich_help_panel=_CLUSTER)
    ] = 512,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Simulations at a time; all cores.", rich_help_panel=_RUN)
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help=_HELP_RAY, rich_help_panel=_RUN),
    ] = None,
    store: Annotated[Path, typer.Option(help=_HELP_STORE, rich_help_panel=_RUN)] = DEFAULT_STORE,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of tables.", rich_help_panel=_OUTPUT)
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the best design as a deployment (YAML).", rich_help_panel=_OUTPUT),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page of pictures here.", rich_help_panel=_OUTPUT)
    ] = None,
) -> None:
    """Find the best machines for a workload: how many, of which kind, and whether to split them by phase.

    Every answer comes from simulations, each with the error of the performance model that it rests on.
    """
    bounds = parse_slo(slo)
    # These are too heavy for the start of every command.
    from twofold.cli import capacity_run, placement_run, plan_question, plan_ray, plan_run  # noqa: PLC0415
    from twofold.cluster.spec import ClusterSpec  # noqa: PLC0415
    from twofold.planning.search import Objective  # noqa: PLC0415
    from twofold.planning.workload import WorkloadArguments  # noqa: PLC0415

    aim = plan_question.parse_objective(objective)
    goodput = aim is Objective.GOODPUT
    problem = plan_question.read_problem(
        ClusterSpec(
            pools=(),
            model=model,
            performance=performance,
            router=router or ("jsq" if goodput else "splitwise"),
            handoff=handoff,
            link_bytes_per_s=None if link_gb_per_s is None else link_gb_per_s * 1e9,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
        ),
        WorkloadArguments(
            workload=workload,
            duration_s=duration,
            min_requests=min_requests or (_FEWEST_FOR_GOODPUT if goodput else _FEWEST),
            start_s=start,
            arrival=arrival,
            burstiness=burstiness,
            length_scale=length_scale,
            max_model_len=max_model_len,
            seed=seed,
        ),
        slo=bounds,
        attainment=attainment,
        reference=reference,
        tensor_parallel=tensor_parallel,
        catalog=catalog or [],
    )
    flags = capacity_run.CapacityFlags(
        nodes=nodes, dram_gb=dram_gb, dram_price=dram_price, disk_price=disk_price
    )
    if kv_capacity:
        capacity_run.run(
            problem,
            capacity_run.read_question(problem, machines, flags),
            html=html,
            output=output,
            as_json=as_json,
        )
        return
    flags.require_none()
    _require_share(tolerance)
    where = plan_run.Where(jobs=jobs, ray=ray, store=store)
    files = plan_run.Files(output=output, html=html)
    if ray is not None and not (family or machines or max_machines or max_gpus):
        found = plan_ray.machines_of(problem, ray, goodput=goodput)
        if found and goodput:
            max_gpus = plan_ray.stock_text(found)
        elif found:
            machines, max_machines = ",".join(found), plan_ray.stock_text(found)
    if goodput:
        placing = placement_run.read_question(
            problem, machines, max_gpus=max_gpus, max_pipeline=max_pipeline, rate=rate, affinity=affinity
        )
        placement_run.run(
            problem,
            placing,
            tolerance=tolerance,
            where=where,
            files=files,
            as_json=as_json,
            inputs=catalog or [],
        )
        return
    if max_gpus is not None:
        raise ConfigurationError("--max-gpus is for --objective goodput: the others count --max-machines")
    question = plan_question.read_question(
        problem,
        objective=aim,
        rate=rate,
        families=family or [],
        machines=machines,
        split=split,
        colocated=colocated,
        max_machines=max_machines,
        max_cost=max_cost,
        max_power_kw=max_power,
    )
    plan_run.run(
        problem,
        question,
        tolerance=tolerance,
        where=where,
        files=files,
        as_json=as_json,
        inputs=catalog or [],
    )


def _require_share(tolerance: float) -> None:
    if not 0.001 <= tolerance <= 0.5:
        raise ConfigurationError(f"--tolerance {tolerance:g} makes no search: give a share from 0.001 to 0.5")
