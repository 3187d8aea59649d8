"""Deployment files: the cluster that a plan chose, what is expected of it and where that comes from."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from twofold import __version__
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.hardware.mistakes import explain
from twofold.planning.objective import Objective
from twofold.planning.plan import Choice
from twofold.planning.problem import Problem
from twofold.simulation.cluster_file import dump_cluster, read_cluster
from twofold.simulation.result import PoolResult
from twofold.simulation.simulate import VERSION
from twofold.simulation.spec import ClusterSpec
from twofold.simulation.verdict import Check
from twofold.slo import Slo, SlowdownSlo

LAYOUT = 1


class Margin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    margins: tuple[Margin, ...] = ()
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


def deployment_of(problem: Problem, choice: Choice, objective: Objective) -> Deployment:
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
        place, what = explain(error)
        raise ConfigurationError(f"deployment {path}: {place + ': ' if place else ''}{what}") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"deployment {path}: {error}") from error
    return msgspec.structs.replace(found, cluster=cluster)


def slo_words(slo: Slo | SlowdownSlo) -> str:
    """The SLO as `--slo` takes it, where it can be said there."""
    if isinstance(slo, SlowdownSlo):
        return "splitwise"
    bounds = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s}
    return ",".join(f"{name}={bound:g}" for name, bound in bounds.items() if bound is not None)


def margins(checks: tuple[Check, ...]) -> Iterator[Margin]:
    """Each bound with the share of it that is left: below 0 where it is missed."""
    for check in checks:
        value, bound = check.value, check.bound
        left = None
        if value is not None and bound:
            left = round((value - bound if check.at_least else bound - value) / bound, 4)
        yield Margin(check=check.name, value=value, bound=bound, left=left)


def _expected(problem: Problem, choice: Choice) -> Expected:
    in_seconds = isinstance(problem.slo, Slo)
    return Expected(
        workload=problem.workload.workload,
        rate=choice.rate,
        highest_rate=choice.highest_rate,
        slo=slo_words(problem.slo),
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
