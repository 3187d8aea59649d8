"""Deployment files: the cluster chosen by a plan, its expected performance, and the inputs of the plan."""

import math
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

import msgspec
import yaml

from twofold import __version__
from twofold.cluster.spec import ClusterSpec
from twofold.planning.plan import DesignChoice
from twofold.planning.problem import Problem
from twofold.planning.search import Objective
from twofold.simulation.result import Check, PoolResult
from twofold.simulation.simulate import VERSION
from twofold.slo import Slo, SlowdownSlo

LAYOUT = 2


class SloMargin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bound of the SLO, the simulated value, and the relative headroom between them."""

    check: str
    bound: float
    value: float | None = None
    headroom: float | None = None  # (bound − value) / bound, negative for a miss


class Expected(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Expected performance of a deployment, by simulation. Rates are in requests/s."""

    workload: str
    rate: float
    highest_rate: float  # at which the SLO is met
    slo: str
    attainment: float | None = None  # required share of requests within an SLO in seconds
    reference: str | None = None
    margins: tuple[SloMargin, ...] = ()
    confidence: float | None = None  # that another draw of the workload meets the SLO
    draws: int | None = None  # checked
    draws_kept: int | None = None
    price_per_h: float
    tdp_w: float
    power_w: float  # mean


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Inputs of the plan that chose the deployment."""

    twofold: str
    simulation: int
    objective: str
    seed: int
    duration_s: float
    trace_sha256: str | None = None
    models: tuple[str, ...] = ()


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of a deployment file."""

    deployment: int
    cluster: ClusterSpec
    expected: Expected
    provenance: Provenance


def deployment_of(problem: Problem, choice: DesignChoice, objective: Objective) -> Deployment:
    """Create the deployment of the design chosen by a plan."""
    spec = problem.spec(choice.design)
    # The file states the tensor parallelism of each pool, even where the plan used the default.
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
            models=tuple(dict.fromkeys(map(model_accuracy, choice.evaluation.pools))),
        ),
    )


def slo_argument(slo: Slo | SlowdownSlo) -> str:
    """Format an SLO in the syntax of the option `--slo`."""
    if isinstance(slo, SlowdownSlo):
        return "splitwise"
    bounds = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.e2e_s}
    return ",".join(f"{name}={bound:g}s" for name, bound in bounds.items() if bound is not None)


def margins(checks: tuple[Check, ...]) -> Iterator[SloMargin]:
    """Yield the bound, the simulated value and the headroom of each SLO check."""
    for check in checks:
        value, bound = check.value, check.bound
        headroom = None
        if value is not None and bound:
            headroom = round((value - bound if check.at_least else bound - value) / bound, 4)
        yield SloMargin(check=check.name, value=value, bound=bound, headroom=headroom)


def _expected(problem: Problem, choice: DesignChoice) -> Expected:
    in_seconds, promise = isinstance(problem.slo, Slo), choice.promise
    return Expected(
        workload=problem.workload.workload,
        rate=choice.rate,
        highest_rate=choice.highest_rate,
        slo=slo_argument(problem.slo),
        attainment=problem.attainment if in_seconds else None,
        reference=None if in_seconds else problem.reference,
        margins=tuple(margins(choice.evaluation.checks)),
        confidence=None if promise is None else promise.confidence,
        draws=None if promise is None else promise.draws,
        draws_kept=None if promise is None else promise.kept,
        price_per_h=choice.design.price_per_h,
        tdp_w=choice.design.tdp_w,
        power_w=round(choice.evaluation.mean_power_w, 1),
    )


def model_accuracy(pool: PoolResult) -> str:
    """Return the name and the prediction errors of a pool's performance model."""
    error = pool.error
    known = ", ".join(
        f"{phase} off by {value:.1%}"
        for phase, value in (("prefill", error.prefill), ("decode", error.decode))
        if value is not None
    )
    parts = [part for part in ("estimated" if error.estimated else "", known or "error unknown", error.basis) if part]
    return f"{pool.performance}: {'; '.join(parts)}"


_WIDTH = 100
_FIELD = re.compile(r"^ *(?:- )*(\w+):.*$", re.MULTILINE)


@cache
def _comments() -> dict[str, str]:
    """Return the comments on the fields of deployment files, by field."""
    return msgspec.toml.decode(
        files("twofold.planning").joinpath("data", "comments.toml").read_bytes(), type=dict[str, str]
    )


def deployment_text(deployment: Deployment, comment: str) -> str:
    """Return a deployment as YAML, with `comment` at the top and a comment on each field."""
    lines = [line for text in comment.splitlines() for line in textwrap.wrap(text, _WIDTH)]
    head = [f"# {line}" for line in lines]
    fields = _set_fields(msgspec.to_builtins(deployment))
    # Each value is on one line, so that a comment can follow it.
    text = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=math.inf)
    return "\n".join([*head, _FIELD.sub(_commented, text)])


def _set_fields(value: object) -> object:
    """Return a value without the fields that are None or empty."""
    if isinstance(value, dict):
        return {key: _set_fields(each) for key, each in value.items() if each not in (None, ())}
    return list(map(_set_fields, value)) if isinstance(value, tuple | list) else value


def _commented(field: re.Match[str]) -> str:
    comment = _comments().get(field[1])
    return field[0] if comment is None else f"{field[0]}  # {comment}"
