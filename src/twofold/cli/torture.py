"""`twofold torture`: compare the answers of a service under faults and disturbing clients with those of an idle one."""

import asyncio
import sys
from pathlib import Path

import typer
from rich.console import Console, Group

from twofold.atomic_file import AtomicFile
from twofold.bench.endpoint import discover
from twofold.bench.prompts import PromptForm, PromptMaker, token_range
from twofold.cli import options
from twofold.cli.bench import PROMPT_FORMS
from twofold.cli.progress import stage_progress
from twofold.cli.settings import Settings, command, flag
from twofold.errors import require
from twofold.reporting.output import same_fields
from twofold.torture.config import TortureConfig
from twofold.torture.faults import parse_kill
from twofold.torture.report import TortureReport, torture_page, torture_tables
from twofold.torture.run import run_torture


class TortureSettings(Settings):
    """All flags of `twofold torture`."""

    url: str = flag("URL of the service.", ..., positional=True, metavar="URL")
    model: str | None = flag("Served model.", unset="the first one of the service")
    reference: str | None = flag("URL of the service that gives the reference answers.", metavar="URL", unset="URL")
    api_key: str | None = flag("API key of both services.", env="OPENAI_API_KEY", metavar="KEY")
    kill: tuple[str, ...] = flag(
        "Shell command that ends, stops or pauses a worker or cuts a link, with or without a name; repeatable.",
        (),
        metavar="NAME=COMMAND",
    )
    every: float = flag("Seconds between two faults; the commands take turns.", 10.0, gt=0)
    duration: float = flag("Length of the load in seconds.", 60.0, gt=0)
    concurrency: int = flag("Number of clients.", 8, ge=1)
    num_prompts: int = flag("Number of different prompts.", 24, ge=1)
    max_prompt_tokens: int = flag("Length of the longest of them in tokens.", 512, ge=1)
    max_tokens: int = flag("Tokens of each answer.", 32, ge=2)
    block_size: int = options.BLOCK_SIZE.field(16)
    prompt_form: str = flag("Form of the prompts.", "tokens", choices=PROMPT_FORMS)
    ignore_eos: bool = flag("Request answers of exactly --max-tokens.", True)
    hang: float = flag("Seconds without a token after which a stream hangs.", 60.0, gt=0)
    settle: float = flag("Longest wait for the recovery of the service after the load, in seconds.", 60.0, ge=0)
    longest_prompt: int | None = flag("Upper limit of the search for the longest prompt.", ge=1, unset="the context")
    metrics: tuple[str, ...] = flag(
        "URL of a server that has /metrics; repeatable.", (), metavar="URL", unset="that of the service"
    )
    allow_broken: bool = flag("Do not fail on broken streams and refused requests.", False)
    seed: int = options.SEED.field(0)
    json: Path | None = flag("Write the report to this file (JSON).", metavar="FILE")
    html: Path | None = options.HTML.field()


@command
def torture(settings: TortureSettings) -> None:
    """Load a service with clients that leave, retry and read slowly, cause faults meanwhile, and compare every answer.

    The service is any with /v1/completions. Exits with 1 if an answer is wrong, a stream hangs or breaks, or a gauge of
    /metrics stays above its idle value.
    """
    facts, page = (None if path is None else AtomicFile(path) for path in (settings.json, settings.html))
    config = asyncio.run(torture_config(settings))
    with stage_progress() as on_stage:
        run = asyncio.run(run_torture(config, on_stage))
    report = TortureReport.of(run, allow_broken=settings.allow_broken)
    Console(width=None if sys.stdout.isatty() else 120).print(Group(*torture_tables(report)))
    for failure in report.failures:
        typer.echo(f"failed: {failure}")
    if facts is not None:
        facts.save(report.json())
    if page is not None:
        page.save(torture_page(report))
    raise typer.Exit(1 if report.failures else 130 if run.interrupted else 0)


async def torture_config(settings: TortureSettings) -> TortureConfig:
    """Return the options of the fault suite. Raises ConfigurationError if a service or a setting is invalid."""
    kills = tuple(map(parse_kill, settings.kill))
    if kills:
        require(settings.every < settings.duration, "--every must be shorter than --duration: no command would run")
    endpoint = await discover(settings.url, settings.model, settings.api_key)
    reference = await discover(settings.reference, None, settings.api_key) if settings.reference else endpoint
    lowest, vocabulary = token_range(endpoint.vocab_size)
    return TortureConfig(
        endpoint=endpoint,
        reference=reference,
        prompts=PromptMaker(
            form=PromptForm(settings.prompt_form),
            seed=settings.seed,
            lowest=lowest,
            vocabulary=vocabulary,
            block_tokens=settings.block_size,
        ),
        kills=kills,
        duration_s=settings.duration,
        every_s=settings.every,
        hang_s=settings.hang,
        settle_s=settings.settle,
        **same_fields(TortureConfig, settings, without=("reference",)),
    )
