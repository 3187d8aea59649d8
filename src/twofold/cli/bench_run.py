"""The steps of `twofold bench`: find the endpoint, read the workload, run until the end or Ctrl-C."""

import asyncio
import signal
from collections.abc import Sequence

from twofold.bench.client import ClientConfig
from twofold.bench.endpoint import Endpoint, discover
from twofold.bench.load import LoadConfig, LoadResult, OnChange, run_load
from twofold.bench.prompts import PromptForm, PromptMaker, token_range
from twofold.cli.bench_report import BenchReport
from twofold.cli.progress import load_progress
from twofold.errors import ConfigurationError
from twofold.request import Request
from twofold.workload.source import is_named, workload

__all__ = [
    "BenchReport",
    "ClientConfig",
    "find_endpoint",
    "is_named",
    "load_config",
    "read_requests",
    "run_to_end",
]


def find_endpoint(base_url: str, model: str | None, api_key: str | None) -> Endpoint:
    return asyncio.run(discover(base_url, model, api_key))


def load_config(
    endpoint: Endpoint,
    *,
    prompt_form: str,
    seed: int,
    vocab_size: int | None,
    client: ClientConfig,
    max_concurrency: int | None,
    warmup: int,
    api_key: str | None,
) -> LoadConfig:
    """Put a load together; chat endpoints take no token ids, so a chat always gets text."""
    if prompt_form not in list(PromptForm):
        raise ConfigurationError(f"--prompt-form {prompt_form} is not one of {', '.join(PromptForm)}")
    form = PromptForm.TEXT if client.chat else PromptForm(prompt_form)
    lowest, vocabulary = token_range(vocab_size or endpoint.vocab_size)
    return LoadConfig(
        endpoint=endpoint,
        prompts=PromptMaker(form=form, seed=seed, lowest=lowest, vocabulary=vocabulary),
        client=client,
        max_concurrency=max_concurrency,
        warmup=warmup,
        api_key=api_key,
    )


def read_requests(
    spec: str,
    *,
    rate: float | None,
    num_requests: int | None,
    duration_s: float | None,
    arrival: str | None,
    burstiness: float,
    seed: int,
    length_scale: float,
    max_model_len: int | None,
) -> list[Request]:
    """The requests to send; raises ConfigurationError where the limits leave none."""
    requests = list(
        workload(
            spec,
            rate=rate,
            num_requests=num_requests,
            duration_s=duration_s,
            arrival=arrival,
            burstiness=burstiness,
            seed=seed,
            length_scale=length_scale,
            max_model_len=max_model_len,
        )
    )
    if not requests:
        raise ConfigurationError(f"workload {spec} gives no request within the limits that were set")
    return requests


def run_to_end(config: LoadConfig, requests: Sequence[Request]) -> LoadResult:
    """Run a load to its end, or to the first Ctrl-C; a second one ends the process as usual."""
    with load_progress(len(requests)) as on_change:
        return asyncio.run(_run(config, requests, on_change))


async def _run(config: LoadConfig, requests: Sequence[Request], on_change: OnChange) -> LoadResult:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        return await run_load(config, requests, stop=stop, on_change=on_change)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
