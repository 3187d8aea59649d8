"""`twofold verify`: replay a workload on a live service and in the simulator, and compare the results."""

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import typer
from rich.console import Console

from twofold.characterize.contention import with_contention
from twofold.characterize.endpoint import EndpointTarget
from twofold.characterize.sweep import measured_slowness
from twofold.cli import options
from twofold.cli.settings import Settings, command, flag, refuse
from twofold.fidelity import comparison
from twofold.fidelity.service import Clients, ServiceDesign, SimulatedEndpoint, SimulatedService, Twin
from twofold.hardware.catalog import load_catalog
from twofold.hardware.hf_config import read_model
from twofold.performance.profile import MeasuredProfile, load_profile, profile_of
from twofold.request import Request
from twofold.slo import Slo
from twofold.workload.source import workload

# Multiples of the highest rate that meets the SLO.
parse_loads: Final = options.numbers("multiples as in 0.5,0.9,2", 100)


class VerifySettings(Settings):
    """All flags of `twofold verify`."""

    target: str = flag("Model directory, or the URL of a running service.", ..., positional=True, metavar="TARGET")
    profile: Path = options.PROFILE.field(...)
    prefill: int = flag("Number of prefill workers.", 0, ge=0, unset="1, unless colocated")
    decode: int = flag("Number of decode workers.", 0, ge=0, unset="1, unless colocated")
    colocated: int = flag("Number of workers that run both phases.", 0, ge=0)
    workload: str = flag("Named workload, such as azure-conv, or path of a trace.", "azure-conv")
    num_requests: int = flag("Number of requests of each load.", 150, names=("--num-requests", "--num-prompts"), ge=1)
    loads: tuple[float, ...] = flag(
        "Loads, as multiples of the highest rate at which the simulation meets the SLO for 90% of the requests.",
        (0.5, 0.9, 2.0),
        metavar="MULTIPLES",
        parse=parse_loads,
        unset="0.5,0.9,2",
    )
    rate: tuple[float, ...] = flag(
        "Requests per second, in place of --loads; repeatable.", (), names=("--rate", "--request-rate")
    )
    concurrency: tuple[int, ...] = flag(
        "Closed loop of this many clients, in place of --loads; repeatable.", (), names=("--concurrency",), ge=1
    )
    think_time: float | None = options.THINK_TIME.field(unset="0")
    length_scale: float = options.LENGTH_SCALE.field(1.0)
    max_model_len: int = flag("Clip requests to this many tokens, prompt and output together.", 2048, ge=2)
    slo: Slo | None = options.SLO_BOUNDS.field(unset="6x TTFT and 5x TPOT of an average request alone")
    replays: int = flag("Number of live replays of each load; their spread is tolerated.", 2, ge=1)
    seed: int = options.SEED.field(0)
    kv_cache_memory_bytes: int = options.KV_CACHE_MEMORY.field(1 << 30, "1GiB")
    max_num_seqs: int = options.MAX_NUM_SEQS.field(64)
    dtype: str = options.DTYPE.field("auto")
    api_key: str | None = flag("API key of a running service.", env="OPENAI_API_KEY", metavar="KEY")
    json: bool = options.JSON.field(False)

    @property
    def is_endpoint(self) -> bool:
        return self.target.startswith(("http://", "https://"))

    @property
    def design(self) -> ServiceDesign:
        """Number of workers of each role in the service. Raises ConfigurationError for an invalid combination."""
        if not (self.prefill or self.decode or self.colocated):
            return ServiceDesign(prefill=1, decode=1)
        design = ServiceDesign(prefill=self.prefill, decode=self.decode, colocated=self.colocated)
        design.workers()  # checks the counts
        return design

    def check_loads(self) -> None:
        """Raise ConfigurationError for flags of a closed loop and of request rates that are given together."""
        if self.concurrency:
            refuse(self, "rate", "sets arrival times, which --concurrency ignores")
        else:
            refuse(self, "think_time", "needs --concurrency")

    def requests(self, rate: float) -> list[Request]:
        """Return the workload's requests at `rate` per second."""
        return list(
            workload(
                self.workload,
                rate=rate,
                num_requests=self.num_requests,
                arrival="poisson",
                seed=self.seed,
                length_scale=self.length_scale,
                max_model_len=self.max_model_len,
            )
        )


@command
def verify(settings: VerifySettings) -> None:
    """Replay a workload on a live service and in the simulator, and print the results side by side.

    TARGET is a model to serve on this host, or the URL of a running service. Exits with 1 if a simulated result differs
    from the live results by more than its tolerance.
    """
    compare = compare_service if settings.is_endpoint else compare_all
    settings.check_loads()
    comparisons = compare(settings, settings.design)
    if settings.json:
        typer.echo(msgspec.json.encode(comparisons).decode())
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(comparison.fidelity_table(comparisons))
    raise typer.Exit(0 if all(each.holds for each in comparisons) else 1)


def compare_service(settings: VerifySettings, design: ServiceDesign) -> list[comparison.Comparison]:
    """Compare the latencies of a running service with its simulation at each request rate."""
    alone = load_profile(settings.profile)
    slo, budget = _slo(settings, alone), alone.max_num_batched_tokens
    target = EndpointTarget(settings.target, api_key=settings.api_key, max_num_batched_tokens=budget)
    profile = with_contention(alone, target, design.counts)
    with tempfile.TemporaryDirectory(prefix="twofold-verify-") as profiles:
        twin = SimulatedEndpoint(design, profile, Path(profiles), profile.extend(load_catalog()))
        return comparison.compare_endpoint(
            partial(comparison.replay_on, settings.target, api_key=settings.api_key),
            twin,
            _loads(settings, twin, slo),
            slo=slo,
            replays=settings.replays,
            on_load=lambda what: typer.echo(what, err=True),
            slowdowns=partial(measured_slowness, target, alone),
        )


def compare_all(settings: VerifySettings, design: ServiceDesign) -> list[comparison.Comparison]:
    """Compare a service on this host with a simulation of the service.

    Raises ConfigurationError if the service's model is not the model with which the profile was measured.
    """
    model = read_model(Path(settings.target))
    profile = profile_of(settings.profile, model)
    kv_bytes, max_num_seqs = settings.kv_cache_memory_bytes, settings.max_num_seqs
    flags = ["--kv-cache-memory-bytes", str(kv_bytes), "--max-num-seqs", str(max_num_seqs)]
    slo = _slo(settings, profile)
    with tempfile.TemporaryDirectory(prefix="twofold-verify-") as profiles:
        simulated = SimulatedService(
            design,
            profile,
            Path(profiles),
            kv_capacity_tokens=kv_bytes // model.kv_bytes_per_token,
            max_num_seqs=max_num_seqs,
            catalog=load_catalog(),
        )
        return comparison.compare(
            Path(settings.target),
            [*flags, "--dtype", settings.dtype],
            simulated,
            _loads(settings, simulated, slo),
            slo=slo,
            replays=settings.replays,
            on_load=lambda what: typer.echo(what, err=True),
        )


def _slo(settings: VerifySettings, profile: MeasuredProfile) -> Slo:
    """Return the SLO from --slo, or a default derived from the measured profile."""
    if settings.slo is not None:
        return settings.slo
    return comparison.default_slo(profile, settings.requests(1.0))


def _loads(settings: VerifySettings, simulated: Twin, slo: Slo) -> list[comparison.OfferedLoad]:
    if settings.concurrency:
        think_s = settings.think_time or 0.0
        requests = settings.requests(1.0)  # their arrival times have no effect
        return [comparison.OfferedLoad(requests=requests, clients=Clients(n, think_s)) for n in settings.concurrency]
    rates = settings.rate
    if not rates:
        highest = comparison.knee(simulated, settings.requests, slo)
        rates = tuple(round(highest * load, 3) for load in settings.loads)
    return [comparison.OfferedLoad(requests=settings.requests(rate), rate=rate) for rate in rates]
