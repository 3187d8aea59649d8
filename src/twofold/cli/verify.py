"""`twofold verify`: whether the simulator says what the service then does."""

from pathlib import Path
from typing import Annotated

import typer

_WORKLOAD = "A named workload, such as azure-conv, or the path of a trace."
_LOADS = "Loads as multiples of the rate up to which the simulation keeps the SLO for 90% of the requests."
_SLO = "Latency bounds in seconds, as in ttft=2,tpot=0.1; 6x TTFT and 5x TPOT of an average request alone if not given."


def verify(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model directory.", show_default=False)],
    profile: Annotated[Path, typer.Option(help="What `twofold calibrate live` wrote on this host.")],
    *,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers; 1 if not colocated.")] = 0,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers; 1 if not colocated.")] = 0,
    colocated: Annotated[int, typer.Option(min=0, help="Workers that do both, instead of split.")] = 0,
    workload: Annotated[str, typer.Option(help=_WORKLOAD)] = "azure-conv",
    num_requests: Annotated[
        int, typer.Option("--num-requests", "--requests", min=1, help="Of each load.")
    ] = 150,
    loads: Annotated[str, typer.Option(help=_LOADS)] = "0.5,0.9,2",
    rate: Annotated[
        list[float] | None, typer.Option(help="Requests per second, in the place of --loads.")
    ] = None,
    length_scale: Annotated[float, typer.Option(help="Multiply prompt and output lengths by this.")] = 1.0,
    max_model_len: Annotated[int, typer.Option(min=2, help="Clip requests to this many tokens.")] = 2048,
    slo: Annotated[str | None, typer.Option(help=_SLO)] = None,
    replays: Annotated[
        int, typer.Option(min=1, help="Live replays of each load; what they differ by is let pass.")
    ] = 2,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 0,
    kv_cache_memory_bytes: Annotated[str, typer.Option(help="KV cache of each worker, as in 500M.")] = "1GiB",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences in an iteration at most.")] = 64,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Replay a workload on a live service and in the simulator, and print both side by side.

    Serves MODEL on this host, in so many workers, and runs the same requests through a simulation of the same service
    from PROFILE. Exits with 1 where the two are further apart than 5 points of attainment, 10% of a median or 15% of
    a P90, beyond what the live replays themselves differ by.
    """
    from twofold.cli import verify_run  # noqa: PLC0415  (imports numpy)

    question = verify_run.Question(
        model=model,
        profile=profile,
        design=verify_run.design_of(prefill, decode, colocated),
        workload=workload,
        num_requests=num_requests,
        loads=verify_run.parse_loads(loads),
        rates=tuple(rate or ()),
        length_scale=length_scale,
        max_model_len=max_model_len,
        slo=slo,
        replays=replays,
        seed=seed,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        max_num_seqs=max_num_seqs,
        dtype=dtype,
    )
    raise typer.Exit(0 if verify_run.run(question, as_json=as_json) else 1)
