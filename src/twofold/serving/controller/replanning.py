"""Adapt the roles of live workers to traffic shifts, and to workers that cannot be started.

The module is also a program that searches for a new plan: it reads a SearchJob (JSON) from standard input and
writes a SearchResult (JSON) to standard output.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final, Protocol

import msgspec

from twofold.errors import RequestError, SearchError, TwofoldError
from twofold.events import Recorder, RequestSubscriber
from twofold.hardware.catalog import load_catalog
from twofold.instance import Role
from twofold.planning.splits import SplitPlanner
from twofold.request import Request
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.replan import replanner
from twofold.scheduling.replan.traffic import TrafficMonitor, TrafficSample
from twofold.serving.config import ReplanConfig
from twofold.serving.launch.child_process import die_with_parent
from twofold.serving.telemetry.snapshot import PoolMember
from twofold.timeline import Timeline

log = logging.getLogger("twofold.serving.controller.replanning")  # __main__ in the search process

_SHOWN: Final = 10  # latest changes shown to operators; the log has all
_NICE: Final = 19


class RoleControl(Protocol):
    """Interface to change the roles of workers, and to retire and restart workers."""

    def pools(self) -> list[PoolMember]: ...

    def set_role(self, instance: str, role: Role) -> None:
        """Change the role of a worker. Raises RequestError if the change is not possible."""
        ...

    def retire(self, instance: str) -> None: ...

    def unretire(self, instance: str, role: Role) -> None: ...

    def retired(self) -> list[str]:
        """Return the retired workers that have exited and can be restarted."""
        ...

    def replanned(self, decision: replanner.ReplanDecision) -> None:
        """Record a re-planning decision."""
        ...


class DegradedMode:
    """Runs a service with fewer workers while resources for the other workers are missing.

    With `roles_move`, workers change roles so that both phases can run. Otherwise, workers of one role retire to free
    resources for the other role.
    """

    def __init__(self, control: RoleControl, *, roles_move: bool) -> None:
        self._control, self._roles_move = control, roles_move
        self._plan: dict[str, Role] = {}  # the original plan; empty while all workers run
        self._given_up: list[str] = []  # retired to free their resources
        self._messages: list[str] = []

    @property
    def messages(self) -> list[str]:
        """Latest changes to and from degraded mode, one sentence each, oldest first."""
        return self._messages[-_SHOWN:]

    def update(self, waiting: Collection[str]) -> None:
        """Continue without the workers in `waiting`, for which the cluster has no resources.

        Some remaining workers may change roles or retire to balance prefill and decode. If `waiting` is empty, undo
        these role changes and retirements.
        """
        roles = {each.instance: each.home for each in self._control.pools() if each.state != "retired"}
        if not waiting:
            self._log(f"all workers have room: {', '.join(self._restore(roles)) or 'the plan is complete again'}")
            return
        self._plan = self._plan or roles
        left = {name: role for name, role in roles.items() if name not in waiting}
        what = f"no room for {', '.join(sorted(waiting))}"
        if Role.MIXED in self._plan.values():
            self._log(f"{what}: continuing with {len(left)} of {len(self._plan)} workers")
            return
        running = _split(left)
        target = replanner.degraded_plan(_split(self._plan), len(left), running)
        if target is None:
            self._log(f"{what}: too few workers remain for two phases")
            return
        steps = self._shrink(target, running, left, waiting)
        self._log(f"{what}: continuing with {target}" + (f", {', '.join(steps)}" if steps else ""))

    def _shrink(
        self, target: replanner.RoleSplit, running: replanner.RoleSplit, left: dict[str, Role], waiting: Collection[str]
    ) -> list[str]:
        many, few = Role.PREFILL, Role.DECODE
        if running.prefill < target.prefill:
            many, few = few, many
        surplus = abs(running.prefill - target.prefill)
        able = [name for name in reversed(left) if left[name] is many]
        if self._roles_move:
            return [f"{name} changes to {few.value}" for name in able[:surplus] if self._moved(name, few)]
        retiring = able[: min(surplus, sum(self._plan.get(name) is few for name in waiting))]
        for name in retiring:
            self._control.retire(name)
            self._given_up.append(name)
        return [f"{name} retires" for name in retiring]

    def _restore(self, roles: Mapping[str, Role]) -> list[str]:
        plan, self._plan = self._plan, {}
        moved = [(name, plan[name]) for name, role in roles.items() if plan.get(name, role) is not role]
        steps = [f"{name} changes back to {role.value}" for name, role in moved if self._moved(name, role)]
        for name in self._given_up:
            self._control.unretire(name, plan[name])
        steps += [f"{name} restarts" for name in self._given_up]
        self._given_up.clear()
        return steps

    def _moved(self, name: str, role: Role) -> bool:
        try:
            self._control.set_role(name, role)
        except RequestError as error:
            log.warning("%s keeps its role: %s", name, error)
            return False
        return True

    def _log(self, sentence: str) -> None:
        log.warning("%s", sentence)
        self._messages.append(sentence)


def _split(roles: Mapping[str, Role]) -> replanner.RoleSplit:
    homes = list(roles.values())
    return replanner.RoleSplit(homes.count(Role.PREFILL), homes.count(Role.DECODE))


class SearchJob(msgspec.Struct, frozen=True, kw_only=True):
    """Input of the search for a new plan: traffic, current roles, number of workers and planner settings."""

    config: ReplanConfig
    traffic: TrafficSample
    running: replanner.RoleSplit
    stock: int


async def search(job: SearchJob) -> replanner.SearchResult:
    """Search for a new plan in a child process. Raises SearchError on failure or timeout."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "twofold.serving.controller.replanning")
    try:
        # In a session of its own, the search would compete with the gateway in spite of its low priority.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, preexec_fn=os.setpgrp
        )
    except OSError as error:
        raise SearchError(f"the search could not be started: {error.strerror}") from error
    limit_s = job.config.search_limit_s
    try:
        output, errors = await asyncio.wait_for(process.communicate(msgspec.json.encode(job)), limit_s)
    except TimeoutError:
        raise SearchError(f"the search was ended after {limit_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        reason = errors.decode(errors="replace").strip().splitlines()
        raise SearchError(reason[-1] if reason else f"the search ended with code {process.returncode}")
    return msgspec.json.decode(output, type=replanner.SearchResult)


Search = Callable[[SearchJob], Awaitable[replanner.SearchResult]]


class LiveReplanning(RequestSubscriber):
    """Searches for a new plan when traffic shifts, and applies it."""

    def __init__(
        self, config: ReplanConfig, pools: Pools, control: RoleControl, recorder: Recorder, run_search: Search = search
    ) -> None:
        self._config, self._pools, self._control, self._run_search = config, pools, control, run_search
        self._replanner = replanner.Replanner(TrafficMonitor(), config.rules)
        self._recorder = recorder
        self._searching: asyncio.Task[None] | None = None

    def messages(self, now: float) -> list[str]:
        """Return the latest re-planning decisions as sentences, oldest first."""
        return [f"{now - each.at_s:.0f} s ago: {each}" for each in self._replanner.log[-_SHOWN:]]

    def arrived(self, request: Request, now: float) -> None:
        """Record the arrival of a request, and start a search for a new plan if traffic has shifted."""
        self._replanner.arrived(request, now)
        traffic = self._replanner.query(self._generated, now)
        if traffic is not None:
            self._searching = asyncio.get_running_loop().create_task(self._search(traffic))

    def rejected(self, timeline: Timeline, reason: str, now: float) -> None:
        self._replanner.ended(timeline)

    def ended(self, timeline: Timeline, now: float) -> None:
        self._replanner.ended(timeline)

    def close(self) -> None:
        if self._searching is not None:
            self._searching.cancel()

    def _generated(self, request_id: str) -> int:
        timeline = self._recorder.get(request_id)
        return 0 if timeline is None else timeline.output_tokens

    async def _search(self, traffic: TrafficSample) -> None:
        running = replanner.RoleSplit.of(self._pools)
        stock = running.instances + len(self._control.retired())
        job = SearchJob(config=self._config, traffic=traffic, running=running, stock=stock)
        try:
            findings = await self._run_search(job)
        except SearchError as error:
            decision = self._replanner.give_up(str(error), time.monotonic())
        else:
            retired = self._control.retired()
            decision = self._replanner.decide(findings, self._pools, retired, time.monotonic())
        log.info("re-planning: %s", decision)
        self._apply(decision)
        self._control.replanned(decision)

    def _apply(self, decision: replanner.ReplanDecision) -> None:
        for step in decision.steps:
            try:
                if step.role is None:
                    self._control.retire(step.instance)
                elif step.action is replanner.ReplanAction.START:
                    self._control.unretire(step.instance, step.role)
                else:
                    self._control.set_role(step.instance, step.role)
            except RequestError as error:  # the worker was lost during the search
                log.warning("re-planning: %s keeps its role: %s", step.instance, error)


def main() -> None:
    die_with_parent(signal.SIGKILL, os.getppid())
    os.nice(_NICE)  # the lowest priority
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=SearchJob)
    config = job.config
    try:
        catalog = load_catalog(config.catalog)
        planner = SplitPlanner(
            config.cluster, catalog, config.slo, attainment=config.attainment, replicas=config.replicas
        )
        findings = planner.search(job.traffic, job.running, job.stock)
    except TwofoldError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(findings))


if __name__ == "__main__":
    main()
