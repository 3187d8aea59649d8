"""`twofold trace`: look at traces, convert and rescale them, generate workloads."""

from pathlib import Path
from typing import Annotated

import typer

from twofold.workload.source import Replay

app = typer.Typer(
    help="Show, convert, rescale and generate traces of requests.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_FORMATS = "azure, mooncake, splitwise or twofold"
_TRACE = "A trace: csv or jsonl, plain or gzip."
_OUT = "The file to write; packed where its name ends in .gz."

FormatOption = Annotated[
    str | None,
    typer.Option("--format", help=f"Format of the trace ({_FORMATS}); found from its content if not given."),
]
ToOption = Annotated[
    str | None, typer.Option(help=f"Format to write ({_FORMATS}); twofold if not given, which loses nothing.")
]
LengthScaleOption = Annotated[
    float,
    typer.Option(help="Multiply prompt and output lengths by this; prefix blocks that change are dropped."),
]
ContextOption = Annotated[
    int | None,
    typer.Option("--max-model-len", help="Clip requests that are longer, prompt and output together."),
]
CountOption = Annotated[int | None, typer.Option("--num-requests", help="At most this many requests.")]
DurationOption = Annotated[float | None, typer.Option(help="Length of the result in seconds.")]


@app.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help=_TRACE)],
    *,
    format_name: FormatOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show how many requests a trace has, when they come, how long they are and what they share."""
    from twofold.cli import trace_run  # noqa: PLC0415 (too heavy for the start of every command)

    trace_run.show_trace(path, format_name, as_json=as_json)


@app.command()
def convert(
    path: Annotated[Path, typer.Argument(metavar="IN", help=_TRACE)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help=_OUT)],
    *,
    format_name: FormatOption = None,
    to: ToOption = None,
    rate: Annotated[
        float | None, typer.Option(help="Scale arrivals to this many requests per second on average.")
    ] = None,
    rate_scale: Annotated[
        float | None, typer.Option(help="Make arrivals this many times as frequent.")
    ] = None,
    length_scale: LengthScaleOption = 1.0,
    max_model_len: ContextOption = None,
    start: Annotated[float, typer.Option(help="Begin at this second of the trace, which becomes 0.")] = 0.0,
    duration: DurationOption = None,
    num_requests: CountOption = None,
) -> None:
    """Convert a trace to another format, and take a part of it or rescale it on the way.

    Times are scaled first, then lengths, and what is then longer than the context is clipped.

    The rate holds for the part that is taken. An output of length 0 is read as 1.
    """
    from twofold.cli import trace_run  # noqa: PLC0415 (too heavy for the start of every command)

    trace_run.convert_trace(
        path,
        out,
        format_name=format_name,
        to=to,
        part=Replay(
            start_s=start, duration_s=duration, num_requests=num_requests, rate=rate, rate_scale=rate_scale
        ),
        length_scale=length_scale,
        max_model_len=max_model_len,
    )


@app.command()
def generate(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A named workload such as azure-conv, or lengths as in 512+64."),
    ],
    *,
    out: Annotated[Path, typer.Option(help=_OUT)],
    rate: Annotated[float, typer.Option(help="Requests per second on average.")],
    to: ToOption = None,
    num_requests: CountOption = None,
    duration: DurationOption = None,
    arrival: Annotated[
        str | None, typer.Option(help="poisson, gamma or constant; poisson if not given.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Shape of gamma arrivals: 1 is Poisson, less is burstier.")
    ] = 1.0,
    length_scale: LengthScaleOption = 1.0,
    max_model_len: ContextOption = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same trace, to the byte.")] = 0,
) -> None:
    """Generate a trace with the lengths of a real service and arrivals of your choice."""
    from twofold.cli import trace_run  # noqa: PLC0415 (too heavy for the start of every command)
    from twofold.workload import source as named  # noqa: PLC0415 (too heavy for the start of every command)

    requests = named.generate(
        name,
        rate=rate,
        num_requests=num_requests,
        duration_s=duration,
        arrival=arrival,
        burstiness=burstiness,
        seed=seed,
    )
    trace_run.generate_trace(requests, out, to=to, length_scale=length_scale, max_model_len=max_model_len)


@app.command()
def reuse(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help=_TRACE)],
    *,
    format_name: FormatOption = None,
    capacity: Annotated[
        list[int] | None,
        typer.Option(
            help="Blocks the cache has room for, several times if wanted; 1,000 to 100,000 if not given."
        ),
    ] = None,
    eviction: Annotated[
        list[str] | None,
        typer.Option(help="lru, lfu or length-aware, several times if wanted; all if not given."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show how many of a trace's prefix blocks a cache would have had, by its size and its eviction rule."""
    from twofold.cli import trace_run  # noqa: PLC0415 (too heavy for the start of every command)

    trace_run.show_reuse(path, format_name, capacity, eviction, as_json=as_json)
