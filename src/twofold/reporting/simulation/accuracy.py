"""How far to trust a number: the held-out errors of the performance models that it rests on."""

from collections.abc import Iterable, Sequence

from twofold.instance import Role
from twofold.performance.base import ModelError
from twofold.request import Phase
from twofold.simulation.result import PoolResult

UNKNOWN = "error unknown"


def describe(error: ModelError) -> str:
    """One performance model: `±10% prefill, ±2% decode: fitted to …`, or `estimated (…): …`."""
    known = ", ".join(
        f"{percent(value)} {phase}"
        for phase, value in ((Phase.PREFILL, error.prefill), (Phase.DECODE, error.decode))
        if value is not None
    )
    if error.estimated:
        where = f" ({known} on pairs that were measured)" if known else ""
        return f"estimated{where}: {error.basis}"
    return f"{known or UNKNOWN}: {error.basis}"


def accuracy(pools: Sequence[PoolResult], phases: Sequence[Phase]) -> str:
    """What a line of results rests on: the worst held-out error of each phase over the pools that run it.

    Empty where no performance model plays a part.
    """
    if not phases:
        return ""
    errors = {phase: [pool.error for pool in _running(pools, phase)] for phase in phases}
    worst = {phase: _worst(of, phase) for phase, of in errors.items()}
    text = ", ".join(f"{value} {phase}" if len(phases) > 1 else value for phase, value in worst.items())
    if set(worst.values()) == {UNKNOWN}:
        text = UNKNOWN
    if any(error.estimated for of in errors.values() for error in of):
        return "estimated" if text == UNKNOWN else f"estimated, {text}"
    return text


def percent(error: float) -> str:
    """A relative error, with a digit more where whole percents would say nothing."""
    return f"±{error:.0%}" if error >= 0.01 else f"±{error:.1%}"


def _running(pools: Sequence[PoolResult], phase: Phase) -> Sequence[PoolResult]:
    """The pools whose role runs a phase; all of them where none does, as a pool policy may move instances."""
    roles = {pool.role: Role(pool.role) for pool in pools}
    prefills = phase is Phase.PREFILL
    running = [p for p in pools if (roles[p.role].prefills if prefills else roles[p.role].decodes)]
    return running or pools


def _worst(errors: Iterable[ModelError], phase: Phase) -> str:
    """The largest error of a phase; one that is unknown makes them all unknown."""
    values = [error.prefill if phase is Phase.PREFILL else error.decode for error in errors]
    known = [value for value in values if value is not None]
    return percent(max(known)) if known and len(known) == len(values) else UNKNOWN
