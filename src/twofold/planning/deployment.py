"""Deployment files: the cluster that a plan chose, what is expected of it and where that comes from.

A deployment as a file for people: YAML in the order of reading, with a comment where a name does not say enough.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from twofold import __version__
from twofold.cluster.file import dump_cluster, read_cluster
from twofold.cluster.spec import ClusterSpec
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.hardware.suggestions import explain_validation
from twofold.planning.plan import DesignChoice
from twofold.planning.problem import Problem
from twofold.planning.search import Objective
from twofold.simulation.result import Check, PoolResult
from twofold.simulation.simulate import VERSION
from twofold.slo import Slo, SlowdownSlo

LAYOUT = 1


class SloMargin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One bound of the SLO: what the simulation had of it, and the share of the bound that is left."""

    check: str
    bound: float
    value: float | None = None
    left: float | None = None


class Expected(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the plan promises, of the workload it was made with.

    Rates are requests per second; `highest_rate` is the most at which the SLO was kept. An SLO in seconds holds for a
    share `attainment` of requests. `power_w` was drawn on average at `rate`; `tdp_w` must be provisioned.
    """

    workload: str
    rate: float
    highest_rate: float
    slo: str
    attainment: float | None = None
    reference: str | None = None
    margins: tuple[SloMargin, ...] = ()
    price_per_h: float
    tdp_w: float
    power_w: float


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the expectation came about; `models` says what each pool's times rest on."""

    twofold: str
    simulation: int
    objective: str
    seed: int
    duration_s: float
    trace_sha256: str | None = None
    models: tuple[str, ...] = ()


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployment file."""

    deployment: int
    cluster: ClusterSpec
    expected: Expected
    provenance: Provenance


def deployment_of(problem: Problem, choice: DesignChoice, objective: Objective) -> Deployment:
    """What a plan chose, as a deployment. Every pool says its tensor parallelism."""
    spec = problem.spec(choice.design)
    pools = tuple(
        msgspec.structs.replace(pool, tensor_parallel=problem.tensor_parallel_on(kind))
        for pool, kind in zip(spec.pools, choice.design.family.kinds, strict=True)
    )
    return Deployment(
        deployment=LAYOUT,
        cluster=msgspec.structs.replace(spec, pools=pools),
        expected=_expected(problem, choice),
        provenance=Provenance(
            twofold=__version__,
            simulation=VERSION,
            objective=objective.value,
            seed=problem.workload.seed,
            duration_s=problem.workload.duration_s,
            trace_sha256=problem.workload.digest() or None,
            models=tuple(dict.fromkeys(map(_model, choice.evaluation.pools))),
        ),
    )


def load_deployment(path: Path, *, catalog: Catalog | None = None) -> Deployment:
    """Read a deployment file; raises ConfigurationError with the place of what is wrong in it."""
    try:
        raw = msgspec.yaml.decode(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"deployment {path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"deployment {path} is not YAML: {reason}") from error
    if not isinstance(raw, dict) or raw.get("deployment") != LAYOUT:
        raise ConfigurationError(
            f"{path} is no deployment file of this version: twofold plan --output writes one"
        )
    try:
        found = msgspec.convert(raw, Deployment, strict=False)
        # The cluster in it is held to what any cluster file is held to.
        cluster = read_cluster(dump_cluster(found.cluster), "cluster.yaml", catalog=catalog)
    except msgspec.ValidationError as error:
        place, what = explain_validation(error)
        raise ConfigurationError(f"deployment {path}: {place + ': ' if place else ''}{what}") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"deployment {path}: {error}") from error
    return msgspec.structs.replace(found, cluster=cluster)


def slo_argument(slo: Slo | SlowdownSlo) -> str:
    """The SLO as `--slo` takes it, where it can be said there."""
    if isinstance(slo, SlowdownSlo):
        return "splitwise"
    bounds = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s}
    return ",".join(f"{name}={bound:g}" for name, bound in bounds.items() if bound is not None)


def margins(checks: tuple[Check, ...]) -> Iterator[SloMargin]:
    """Each bound with the share of it that is left: below 0 where it is missed."""
    for check in checks:
        value, bound = check.value, check.bound
        left = None
        if value is not None and bound:
            left = round((value - bound if check.at_least else bound - value) / bound, 4)
        yield SloMargin(check=check.name, value=value, bound=bound, left=left)


def _expected(problem: Problem, choice: DesignChoice) -> Expected:
    in_seconds = isinstance(problem.slo, Slo)
    return Expected(
        workload=problem.workload.workload,
        rate=choice.rate,
        highest_rate=choice.highest_rate,
        slo=slo_argument(problem.slo),
        attainment=problem.attainment if in_seconds else None,
        reference=None if in_seconds else problem.reference,
        margins=tuple(margins(choice.evaluation.checks)),
        price_per_h=choice.design.price_per_h,
        tdp_w=choice.design.tdp_w,
        power_w=round(choice.evaluation.mean_power_w, 1),
    )


def _model(pool: PoolResult) -> str:
    """`fitted bloom-176b on dgx-h100 TP8: prefill off by 3%, decode by 2%; fitted to …`."""
    error = pool.error
    known = ", ".join(
        f"{phase} off by {value:.1%}"
        for phase, value in (("prefill", error.prefill), ("decode", error.decode))
        if value is not None
    )
    said = [
        part
        for part in ("estimated" if error.estimated else "", known or "error unknown", error.basis)
        if part
    ]
    return f"{pool.performance}: {'; '.join(said)}"


_WIDTH = 100
_COMMENTS = {
    "deployment": "layout of this file",
    "cluster": "what to run: the fields of a cluster file, as twofold simulate --config takes",
    "machines": "how many",
    "tensor_parallel": "accelerators per instance",
    "batcher": "how an instance puts its batches together; the role's own where nothing is said",
    "router": "how requests find their instances",
    "handoff": "how the KV cache travels from prefill to decode",
    "max_num_batched_tokens": "prompt tokens of an iteration, at most",
    "pipeline_chunk": "prompt tokens of a chunk, where a pipeline computes chunks of one prompt at once",
    "inline_tbt_s": "seconds that an iteration of the batcher inlined may take",
    "max_num_seqs": "sequences of an iteration, at most",
    "block_size": "tokens of a KV block",
    "memory_utilization": "share of accelerator memory for weights and KV cache",
    "swap_space_bytes": "host memory of an instance to swap to; outputs then take KV memory as they grow",
    "performance": "performance model that the expectation rests on, and whose time an emulated service takes",
    "contention": "whether transfers shared the link in the simulation",
    "rules": "of the simulation",
    "expected": "what the simulation promises",
    "rate": "requests per second that this was planned for",
    "highest_rate": "requests per second up to which the SLO was kept",
    "slo": "seconds, or splitwise: percentiles of slow-downs against the reference",
    "attainment": "share of requests that keep the SLO, at least",
    "reference": "machine that slow-downs are multiples of",
    "margins": "of each bound: what the simulation had of it, and the share that is left",
    "price_per_h": "US dollars",
    "tdp_w": "watts to provision",
    "power_w": "watts drawn at that rate, on average",
    "provenance": "where all of this comes from",
    "simulation": "version of the simulator",
    "duration_s": "seconds of arrivals per simulation, or longer for small rates",
    "models": "what times rest on, and how far they were from measurements they had not seen",
}


def deployment_text(deployment: Deployment, comment: str) -> str:
    """The file; `comment` is the text above it."""
    lines = [line for text in comment.splitlines() for line in textwrap.wrap(text, _WIDTH)]
    head = [f"# {line}" for line in lines]
    return "\n".join([*head, *_mapping(msgspec.to_builtins(deployment), 0)]) + "\n"


def _mapping(fields: Mapping[str, object], depth: int) -> Iterator[str]:
    pad = "  " * depth
    for key, value in fields.items():
        if value is None or value == ():
            continue
        comment = f"  # {_COMMENTS[key]}" if key in _COMMENTS else ""
        if isinstance(value, Mapping):
            yield f"{pad}{key}:{comment}"
            yield from _mapping(value, depth + 1)
        elif isinstance(value, tuple | list):
            yield f"{pad}{key}:{comment}"
            yield from _sequence(value, depth + 1)
        else:
            yield f"{pad}{key}: {_scalar(value)}{comment}"


def _sequence(items: Sequence[object], depth: int) -> Iterator[str]:
    pad = "  " * depth
    for item in items:
        if isinstance(item, Mapping):
            first, *rest = _mapping(item, depth + 1)
            yield f"{pad}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{pad}- {_scalar(item)}"


def _scalar(value: object) -> str:
    """JSON, which is YAML; words that cannot be taken for anything else go without quotes."""
    if isinstance(value, str) and value.isascii() and value.replace("-", "").isalpha():
        return (
            value
            if value.lower() not in {"yes", "no", "on", "off", "true", "false", "null", "y", "n"}
            else f'"{value}"'
        )
    return msgspec.json.encode(value).decode()
