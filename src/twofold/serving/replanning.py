"""Re-planning live: the decisions of `twofold.scheduling.replanning` on the requests of a service."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from twofold.errors import RequestError, SearchError
from twofold.instance import Role
from twofold.request import Request
from twofold.scheduling.pools import Pools
from twofold.scheduling.replan_log import Decision, Findings
from twofold.scheduling.replanning import Question, Replanner
from twofold.scheduling.split import Action, Split
from twofold.scheduling.traffic import TrafficWatch
from twofold.serving.config import ReplanConfig
from twofold.serving.replan_search import SearchJob, search
from twofold.timeline import Timeline

log = logging.getLogger(__name__)

_SAID: Final = 10  # decisions that are told to who asks; all are in the log


class Movable(Protocol):
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

    def replanned(self, decision: Decision) -> None:
        """A decision was made, and its steps are taken."""
        ...


Search = Callable[[SearchJob], Awaitable[Findings]]


class LiveReplanning:
    """Told by the controller of every request that comes and ends; moves workers by what a search says.

    One search runs at a time, outside of this process. A request costs what `TrafficWatch` says.
    """

    def __init__(
        self, config: ReplanConfig, pools: Pools, service: Movable, run_search: Search = search
    ) -> None:
        self._config, self._pools, self._service, self._run_search = config, pools, service, run_search
        self._replanner = Replanner(TrafficWatch(), config.rules)
        self._numbers: dict[str, int] = {}  # of the requests that have not ended
        self._timelines: dict[int, Timeline] = {}
        self._searching: asyncio.Task[None] | None = None

    def said(self, now: float) -> list[str]:
        """The latest decisions, the last one last."""
        return [f"{now - each.at_s:.0f} s ago: {each}" for each in self._replanner.log[-_SAID:]]

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

    async def _search(self, question: Question) -> None:
        running = Split.of(self._pools)
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

    def _take(self, decision: Decision) -> None:
        """Workers that have gone since keep their role, and the others change theirs all the same."""
        for step in decision.steps:
            try:
                if step.role is None:
                    self._service.retire(step.instance)
                elif step.action is Action.START:
                    self._service.want(step.instance, step.role)
                else:
                    self._service.set_role(step.instance, step.role)
            except RequestError as error:
                log.warning("re-planning: %s stays as it is: %s", step.instance, error)
