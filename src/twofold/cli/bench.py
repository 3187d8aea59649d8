"""`twofold bench`: load any OpenAI-compatible endpoint and report what its users would feel."""

import os
from pathlib import Path
from typing import Annotated

import typer

from twofold.errors import ConfigurationError
from twofold.slo import Slo

DEFAULT_REQUESTS = 100
DEFAULT_RATE = 1.0
INTERRUPTED = 130

_WORKLOAD = "A named workload, such as azure-conv, or the path of a trace."
_RATE = f"Requests per second; a trace's own, or {DEFAULT_RATE:g} for a named workload, if not given."
_COUNT = f"How many requests; {DEFAULT_REQUESTS} if neither this nor --duration is given."
_ARRIVAL = "Arrival process: trace, poisson, gamma or constant."
_BURSTINESS = "Shape of gamma arrivals: 1 is Poisson, less is burstier."
_LENGTH = "Clip requests to this many tokens, prompt and output; the model's own limit if not given."
_FORM = "tokens (exact length) or text (about that long, for endpoints that take no token ids)."
_VOCABULARY = "Draw token ids below this; needed only where the vocabulary is small and the endpoint silent."
_CAP = "Cap on requests in flight; waiting for a slot counts as send lag."
_KEY = "Sent as a bearer token; the environment's OPENAI_API_KEY if not given."


def bench(
    base_url: Annotated[str, typer.Option(help="Where the endpoint is.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Served model; the first one if not given.")] = None,
    workload: Annotated[str, typer.Option(help=_WORKLOAD)] = "azure-conv",
    rate: Annotated[float | None, typer.Option("--rate", "--request-rate", help=_RATE)] = None,
    num_requests: Annotated[
        int | None, typer.Option("--num-requests", "--num-prompts", min=1, help=_COUNT)
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Send for this many seconds.")] = None,
    arrival: Annotated[str | None, typer.Option(help=_ARRIVAL)] = None,
    burstiness: Annotated[float, typer.Option(help=_BURSTINESS)] = 1.0,
    length_scale: Annotated[float, typer.Option(help="Multiply prompt and output lengths by this.")] = 1.0,
    max_model_len: Annotated[int | None, typer.Option(min=2, help=_LENGTH)] = None,
    slo: Annotated[str | None, typer.Option(help="Latency bounds in seconds, as in ttft=2,tpot=0.1.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals and prompts.")] = 0,
    prompt_form: Annotated[str, typer.Option(help=_FORM)] = "tokens",
    vocab_size: Annotated[int | None, typer.Option(min=2, help=_VOCABULARY)] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Use /v1/chat/completions, with text prompts.")
    ] = False,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for outputs of exactly the workload's length.")
    ] = True,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help=_CAP)] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests to send before measuring.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a request may take.")] = 600.0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    per_request: Annotated[bool, typer.Option("--per-request", help="Put every request into it.")] = False,
    api_key: Annotated[str | None, typer.Option(help=_KEY)] = None,
) -> None:
    """Load an OpenAI-compatible endpoint as a workload says; report latency, throughput and goodput."""
    from twofold.cli import bench_run  # noqa: PLC0415 (what it needs is too heavy for the start of every command)

    bounds = None if slo is None else Slo.parse(slo)
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ConfigurationError(f"--json {json_path}: there is no directory {json_path.absolute().parent}")
    key = api_key or os.environ.get("OPENAI_API_KEY")
    config = bench_run.load_config(
        bench_run.find_endpoint(base_url, model, key),
        prompt_form=prompt_form,
        seed=seed,
        vocab_size=vocab_size,
        client=bench_run.ClientConfig(
            timeout_s=timeout, temperature=temperature, ignore_eos=ignore_eos, chat=chat
        ),
        max_concurrency=max_concurrency,
        warmup=warmup,
        api_key=key,
    )
    requests = bench_run.read_requests(
        workload,
        rate=DEFAULT_RATE if rate is None and bench_run.is_named(workload) else rate,
        num_requests=DEFAULT_REQUESTS if num_requests is None and duration is None else num_requests,
        duration_s=duration,
        arrival=arrival,
        burstiness=burstiness,
        seed=seed,
        length_scale=length_scale,
        max_model_len=max_model_len or config.endpoint.max_model_len,
    )
    result = bench_run.run_to_end(config, requests)
    report = bench_run.BenchReport.of(workload, config, result, bounds, per_request=per_request)
    report.show(result)
    if json_path is not None:
        report.write(json_path)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    if report.summary.failed and not report.summary.completed:
        raise typer.Exit(1)
