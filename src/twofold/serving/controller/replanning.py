"""A search for a better plan, in a process of its own: it takes seconds of computing, and streams must not wait for it.

`main` is that process: it reads a `SearchJob` from its standard input and writes `SearchResult` to its standard output.
It is as nice as can be, and ends with the service.

What becomes of the plan while the launcher has no room for some of its workers.

all have room ── some wait ──▶ a smaller plan for those left ── more, or fewer, wait ──▶ another
      ▲                                         │
      └──────── the plan as it was ◀── none waits

Re-planning live: the decisions of `twofold.scheduling.replan.replanner` on the requests of a service.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec

from twofold.errors import RequestError, SearchError, TwofoldError
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.planning.splits import SplitPlanner
from twofold.request import Request
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.replan.replanner import ReplanDecision, Replanner, ReplanQuery, SearchResult
from twofold.scheduling.replan.split import ReplanAction, RoleSplit, degraded_plan
from twofold.scheduling.replan.traffic import TrafficMonitor, TrafficSample
from twofold.serving.config import ReplanConfig
from twofold.serving.controller.service import PoolMember
from twofold.serving.launch.child_process import die_with_parent
from twofold.timeline import Timeline

_NICE = 19


class SearchJob(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `Planner.search`, and what the planner is made of."""

    config: ReplanConfig
    traffic: TrafficSample
    running: RoleSplit
    stock: int


async def search(job: SearchJob) -> SearchResult:
    """Run the job; raises SearchError if it fails or takes longer than it may. A search that is cancelled is ended."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "twofold.serving.controller.replanning")
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError as error:
        raise SearchError(f"the search could not be started: {error.strerror}") from error
    limit_s = job.config.search_limit_s
    try:
        said, errors = await asyncio.wait_for(process.communicate(msgspec.json.encode(job)), limit_s)
    except TimeoutError:
        raise SearchError(f"the search was ended after {limit_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        reason = errors.decode(errors="replace").strip().splitlines()
        raise SearchError(reason[-1] if reason else f"the search ended with code {process.returncode}")
    return msgspec.json.decode(said, type=SearchResult)


def main() -> None:
    die_with_parent(signal.SIGKILL, os.getppid())
    os.nice(_NICE)
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=SearchJob)
    config = job.config
    try:
        catalog = load_catalog([Path(file) for file in config.catalog])
        planner = SplitPlanner(
            config.cluster, catalog, config.slo, attainment=config.attainment, replicas=config.replicas
        )
        findings = planner.search(job.traffic, job.running, job.stock)
    except TwofoldError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(findings))


if __name__ == "__main__":
    main()


log = logging.getLogger(__name__)

_SAID = 10  # changes that are told to who asks; all are in the log


class Staff(Protocol):
    """The workers of a service, and what a shortage does to them."""

    def pools(self) -> list[PoolMember]: ...

    def set_role(self, instance: str, role: Role) -> None: ...

    def retire(self, instance: str) -> None: ...

    def want(self, instance: str, role: Role) -> None: ...


class DegradedMode:
    """Keeps both phases going with the workers that are left, and brings the plan back when there is room.

    Where `roles_move`, a worker takes the role that is missing. Else one of the other phase retires, and so gives its
    room to one that waits. Workers that do both phases need neither.
    """

    def __init__(self, staff: Staff, *, roles_move: bool) -> None:
        self._staff, self._roles_move = staff, roles_move
        self._plan: dict[str, Role] = {}  # as it was when the shortage began; empty while there is none
        self._given_up: list[str] = []  # retired, so that others have room
        self._said: list[str] = []

    @property
    def said(self) -> list[str]:
        """A sentence for each of the latest changes, the last one last."""
        return self._said[-_SAID:]

    def waiting(self, names: Collection[str]) -> None:
        """For these workers there is no room now, and there is for all others."""
        roles = {each.instance: each.home for each in self._staff.pools() if each.state != "retired"}
        if not names:
            self._say(f"all workers have room: {_listed(self._restore(roles)) or 'the plan is whole again'}")
            return
        self._plan = self._plan or roles
        left = {name: role for name, role in roles.items() if name not in names}
        what = f"no room for {_listed(sorted(names))}"
        if Role.MIXED in self._plan.values():
            self._say(f"{what}: {len(left)} of {len(self._plan)} workers go on")
            return
        running = _split(left)
        target = degraded_plan(_split(self._plan), len(left), running)
        if target is None:
            self._say(f"{what}: too few workers are left for two phases")
            return
        steps = self._make(target, running, left, names)
        self._say(f"{what}: {target} for what is left" + (f", {_listed(steps)}" if steps else ""))

    def _make(
        self, target: RoleSplit, running: RoleSplit, left: dict[str, Role], waiting: Collection[str]
    ) -> list[str]:
        """The steps to a smaller plan, taken: those that were planned last go first."""
        many, few = Role.PREFILL, Role.DECODE
        if running.prefill < target.prefill:
            many, few = few, many
        surplus = abs(running.prefill - target.prefill)
        able = [name for name in reversed(left) if left[name] is many]
        if self._roles_move:
            return [f"{name} goes to {few.value}" for name in able[:surplus] if self._moved(name, few)]
        helped = sum(self._plan.get(name) is few for name in waiting)
        for name in able[: min(surplus, helped)]:
            self._staff.retire(name)
            self._given_up.append(name)
        return [f"{name} retires" for name in able[: min(surplus, helped)]]

    def _restore(self, roles: Mapping[str, Role]) -> list[str]:
        """The steps back to the plan, taken."""
        plan, self._plan = self._plan, {}
        moved = [(name, plan[name]) for name, role in roles.items() if plan.get(name, role) is not role]
        steps = [f"{name} goes back to {role.value}" for name, role in moved if self._moved(name, role)]
        for name in self._given_up:
            self._staff.want(name, plan[name])
        steps += [f"{name} is started again" for name in self._given_up]
        self._given_up.clear()
        return steps

    def _moved(self, name: str, role: Role) -> bool:
        try:
            self._staff.set_role(name, role)
        except RequestError as error:
            log.warning("%s stays as it is: %s", name, error)
            return False
        return True

    def _say(self, sentence: str) -> None:
        log.warning("%s", sentence)
        self._said.append(sentence)


def _split(roles: Mapping[str, Role]) -> RoleSplit:
    homes = list(roles.values())
    return RoleSplit(homes.count(Role.PREFILL), homes.count(Role.DECODE))


def _listed(words: Collection[str]) -> str:
    return ", ".join(words)


_REPLANNING_SAID: Final = 10  # decisions that are told to who asks; all are in the log


class RoleControl(Protocol):
    """What re-planning does to a service."""

    def set_role(self, instance: str, role: Role) -> None:
        """As an operator would; raises RequestError where it cannot be."""
        ...

    def retire(self, instance: str) -> None:
        """Give it nothing new, and end it when it has ended what it has."""
        ...

    def want(self, instance: str, role: Role) -> None:
        """Start it again."""
        ...

    def retired(self) -> list[str]:
        """What may be started."""
        ...

    def replanned(self, decision: ReplanDecision) -> None:
        """A decision was made, and its steps are taken."""
        ...


Search = Callable[[SearchJob], Awaitable[SearchResult]]


class LiveReplanning:
    """Told by the controller of every request that comes and ends; moves workers by what a search says.

    One search runs at a time, outside of this process. A request costs what `TrafficMonitor` says.
    """

    def __init__(
        self, config: ReplanConfig, pools: Pools, service: RoleControl, run_search: Search = search
    ) -> None:
        self._config, self._pools, self._service, self._run_search = config, pools, service, run_search
        self._replanner = Replanner(TrafficMonitor(), config.rules)
        self._numbers: dict[str, int] = {}  # of the requests that have not ended
        self._timelines: dict[int, Timeline] = {}
        self._searching: asyncio.Task[None] | None = None

    def said(self, now: float) -> list[str]:
        """The latest decisions, the last one last."""
        return [f"{now - each.at_s:.0f} s ago: {each}" for each in self._replanner.log[-_REPLANNING_SAID:]]

    def arrived(self, request: Request) -> None:
        """A request came, whether it will be taken or not; to be called in the event loop."""
        now = time.monotonic()
        self._numbers[request.id] = self._replanner.watch.arrived(request.prompt_tokens, now)
        question = self._replanner.question(self._made, now)
        if question is not None:
            self._searching = asyncio.get_running_loop().create_task(self._search(question))

    def taken(self, timeline: Timeline) -> None:
        """A request that came was taken, and this is what becomes of it."""
        self._timelines[self._numbers[timeline.request.id]] = timeline

    def refused(self, request_id: str) -> None:
        """A request that came was not taken."""
        self._ended(request_id, None)

    def observe(self, timeline: Timeline) -> None:
        """A request ended: a sink of the controller's recorder."""
        self._ended(timeline.request.id, timeline.output_tokens if timeline.complete else None)

    def close(self) -> None:
        """End the search that is under way."""
        if self._searching is not None:
            self._searching.cancel()

    def _ended(self, request_id: str, output_tokens: int | None) -> None:
        number = self._numbers.pop(request_id, None)
        if number is not None:
            self._timelines.pop(number, None)
            self._replanner.watch.ended(number, output_tokens)

    def _made(self, number: int) -> int:
        """Tokens that a request has so far."""
        timeline = self._timelines.get(number)
        return 0 if timeline is None else timeline.output_tokens

    async def _search(self, question: ReplanQuery) -> None:
        running = RoleSplit.of(self._pools)
        stock = running.instances + len(self._service.retired())
        job = SearchJob(config=self._config, traffic=question.traffic, running=running, stock=stock)
        try:
            findings = await self._run_search(job)
        except SearchError as error:
            decision = self._replanner.give_up(str(error), time.monotonic())
        else:
            retired = self._service.retired()
            decision = self._replanner.answer(findings, self._pools, retired, time.monotonic())
        log.info("re-planning: %s", decision)
        self._take(decision)
        self._service.replanned(decision)

    def _take(self, decision: ReplanDecision) -> None:
        """Workers that have gone since keep their role, and the others change theirs all the same."""
        for step in decision.steps:
            try:
                if step.role is None:
                    self._service.retire(step.instance)
                elif step.action is ReplanAction.START:
                    self._service.want(step.instance, step.role)
                else:
                    self._service.set_role(step.instance, step.role)
            except RequestError as error:
                log.warning("re-planning: %s stays as it is: %s", step.instance, error)
