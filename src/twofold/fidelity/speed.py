"""How fast a host was while a service ran on it, by what its workers' iterations took.

A host that others share has another speed from one minute to the next, and a profile is of the minutes in which it was
measured. Nor do both phases slow down alike: prefill is bound by compute, decode by memory, and who else is on the host
may want more of the one or of the other. What iterations took over what the profile says they take, given everything
that ran beside them, is a number for each phase and stretch of time. It says nothing of how requests are scheduled, of
how they wait or of how batches form: all of that is left to the simulation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from twofold.fidelity.journals import Ran, WorkerLog
from twofold.performance.host_profile import FrontTimes, HostProfile, Slowdowns
from twofold.serving.config import WorkerConfig
from twofold.serving.plan import own_cores
from twofold.simulation.cores import gateway_cores
from twofold.timeline import Moment, Timeline


@dataclass(frozen=True, slots=True)
class Span:
    """When a service was loaded, from the first request to the last token (monotonic seconds), and with how much."""

    start_s: float
    end_s: float
    requests: int
    tokens: int

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @classmethod
    def of(cls, timelines: Sequence[Timeline]) -> "Span":
        """Of requests that were all answered."""
        return cls(
            start_s=min(timeline.moments[Moment.ARRIVED] for timeline in timelines),
            end_s=max(timeline.moments[Moment.LAST_TOKEN] for timeline in timelines),
            requests=len(timelines),
            tokens=sum(timeline.output_tokens for timeline in timelines),
        )


class Slowness(NamedTuple):
    """How many times longer than the profile says iterations with prompts took, and those of decodes alone."""

    prompts: float
    decodes: float


AS_CALIBRATED = Slowness(1.0, 1.0)


def slowness(
    profile: HostProfile, workers: Sequence[WorkerConfig], logs: Mapping[str, WorkerLog], span: Span
) -> Slowness:
    """Of that span. A phase of which nothing ran has the speed of the other; where neither ran nothing is slower."""
    cores = own_cores()
    shared = gateway_cores(cores, ((worker.role, worker.cores) for worker in workers))
    front = _front_share(profile.front, logs, span) / len(shared)
    took, expected = [0.0, 0.0], [0.0, 0.0]  # with prompts, decodes alone
    for worker in workers:
        turns = [each for each in workers if each is not worker and _meet(each, worker)]
        beside = [each for each in workers if not _meet(each, worker)]
        away = len(cores) - len(worker.cores)
        weight = len(worker.cores) / away if away else 0.0
        taken = front * len(set(shared) & set(worker.cores)) / len(worker.cores)
        for one in logs[worker.instance].between(span.start_s, span.end_s):
            crowd = min(1.0, sum(_busy(one, logs[each.instance]) for each in beside) * weight)
            kind = 0 if one.iteration.tokens else 1
            took[kind] += one.iteration.seconds
            met = [(_busy(one, logs[each.instance]), each.role is not worker.role) for each in turns]
            pace = _pace(profile, one, met)
            slower = 1.0 + (_slowdowns(profile, one).crowded - 1.0) * crowd
            expected[kind] += _alone_s(profile, one) * slower / pace / (1.0 - taken)
    known = [one / other if other else None for one, other in zip(took, expected, strict=True)]
    prompts, decodes = known
    usual = prompts or decodes or 1.0
    return Slowness(prompts or usual, decodes or usual)


def _alone_s(profile: HostProfile, one: Ran) -> float:
    return one.iteration.predicted_s(profile.engine) + (profile.engine.cold_s if one.cold else 0.0)


def _slowdowns(profile: HostProfile, one: Ran) -> Slowdowns:
    return profile.prefill if one.iteration.tokens else profile.decode


def _pace(profile: HostProfile, one: Ran, turns: Sequence[tuple[float, bool]]) -> float:
    """How fast it got on, compared with a core of its own, beside workers that were busy for such shares of its time.

    Each with whether it is of the other phase.
    """
    if not turns:
        return 1.0
    # As if it had shared that much of its time with all of them, and the rest with none.
    met = sum(busy for busy, _ in turns) / len(turns)
    other = sum(busy for busy, unlike in turns if unlike) / (met * len(turns)) if met else 0.0
    shared = 1.0 + (_slowdowns(profile, one).shared - 1.0) * other
    return 1.0 - met + met / (1.0 + len(turns)) / shared


def _busy(one: Ran, log: WorkerLog) -> float:
    return log.busy_share(one.start_s, one.end_s)


def _meet(one: WorkerConfig, other: WorkerConfig) -> bool:
    return bool(set(one.cores) & set(other.cores))


def _front_share(front: FrontTimes, logs: Mapping[str, WorkerLog], span: Span) -> float:
    """How much of a core gateway and clients used, as the profile has it."""
    steps = sum(len(log.between(span.start_s, span.end_s)) for log in logs.values())
    spent = front.request_s * span.requests + front.step_s * steps + front.token_s * span.tokens
    return spent / span.seconds
