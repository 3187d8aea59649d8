"""What `twofold verify` does: plan the loads, run both worlds, print the comparison."""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import typer
from rich.console import Console

from twofold.cli.sizes import parse_size
from twofold.errors import ConfigurationError
from twofold.fidelity.comparison import Comparison, compare, fidelity_table, knee
from twofold.fidelity.service import ServiceDesign, SimulatedService
from twofold.hardware.catalog import load_catalog
from twofold.hardware.hf_config import read_model
from twofold.performance.host_profile import HostProfile, PackedModel, read_host_profile
from twofold.request import Request
from twofold.slo import Slo
from twofold.workload.source import workload

_TTFT, _TPOT = 6.0, 5.0  # Splitwise's bounds on the P99 slow-down (table VI)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The flags of `twofold verify`; what has a default here has the same there."""

    model: Path
    profile: Path
    design: ServiceDesign
    workload: str
    num_requests: int
    loads: tuple[float, ...]
    rates: tuple[float, ...] = ()
    length_scale: float
    max_model_len: int = 2048
    slo: str | None
    replays: int
    seed: int = 0
    kv_cache_memory_bytes: str = "1GiB"
    max_num_seqs: int = 64
    dtype: str = "auto"

    def requests(self, rate: float) -> list[Request]:
        """The workload at that many requests per second."""
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


def run(question: Question, *, as_json: bool) -> bool:
    """Compare and print; whether the simulation holds."""
    comparisons = compare_all(question)
    if as_json:
        typer.echo(msgspec.json.encode(comparisons).decode())
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(fidelity_table(comparisons))
    return all(comparison.holds for comparison in comparisons)


def compare_all(question: Question) -> list[Comparison]:
    """Every load of the question in both worlds; raises ConfigurationError for what does not fit together."""
    profile = read_host_profile(question.profile)
    known = read_model(question.model)
    if known.name != profile.model.name or known.parameters != profile.model.parameters:
        raise ConfigurationError(
            f"{question.profile} is a profile of {profile.model.name}, and the model is {known.name}: calibrate with it"
        )
    kv_bytes = parse_size(question.kv_cache_memory_bytes)
    flags = ["--kv-cache-memory-bytes", str(kv_bytes), "--max-num-seqs", str(question.max_num_seqs)]
    slo = _slo(question, profile)
    with tempfile.TemporaryDirectory(prefix="twofold-verify-") as profiles:
        twin = SimulatedService(
            question.design,
            profile,
            Path(profiles),
            kv_capacity_tokens=kv_bytes // known.kv_bytes_per_token,
            max_num_seqs=question.max_num_seqs,
            catalog=load_catalog(),
        )
        return compare(
            question.model,
            [*flags, "--dtype", question.dtype],
            twin,
            {rate: question.requests(rate) for rate in _rates(question, twin, slo)},
            slo=slo,
            replays=question.replays,
            on_load=lambda what: typer.echo(what, err=True),
        )


def design_of(prefill: int, decode: int, colocated: int) -> ServiceDesign:
    """That of the flags, 1P+1D where they say nothing."""
    if not (prefill or decode or colocated):
        return ServiceDesign(prefill=1, decode=1)
    design = ServiceDesign(prefill=prefill, decode=decode, colocated=colocated)
    design.workers()  # which refuses what cannot be
    return design


def parse_loads(text: str) -> tuple[float, ...]:
    """Read `0.5,0.9,2`; raises ConfigurationError on anything else."""
    try:
        loads = tuple(float(part) for part in text.split(","))
    except ValueError:
        loads = ()
    if not loads or not all(0 < load < 100 for load in loads):
        raise ConfigurationError(f"--loads {text!r} is not understood: write multiples as in 0.5,0.9,2")
    return loads


def _slo(question: Question, profile: HostProfile) -> Slo:
    """What was asked for, else multiples of what an average request takes that has the service to itself."""
    if question.slo is not None:
        return Slo.parse(question.slo)
    sample = question.requests(1.0)
    prompt = sum(request.prompt_tokens for request in sample) // len(sample)
    output = sum(request.output_tokens for request in sample) // len(sample)
    ttft_s, tpot_s = PackedModel("", profile.engine).uncontended(prompt, output)
    return Slo(ttft_s=round(_TTFT * ttft_s, 3), tpot_s=round(_TPOT * tpot_s, 4))


def _rates(question: Question, twin: SimulatedService, slo: Slo) -> tuple[float, ...]:
    if question.rates:
        return question.rates
    most = knee(twin, question.requests, slo)
    return tuple(round(most * load, 3) for load in question.loads)
