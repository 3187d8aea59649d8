"""Routers that use load forecasts: shortest predicted queue, and Mooncake's Conductor."""

from abc import abstractmethod
from typing import ClassVar, NamedTuple

from mypy_extensions import mypyc_attr

from twofold.events import Route
from twofold.instance import InstanceLoad
from twofold.request import Request
from twofold.route import PrefixFetch
from twofold.scheduling.cluster.forecast import ClusterForecast
from twofold.scheduling.cluster.pools import Pool, Pools, reserved_tokens
from twofold.scheduling.cluster.router import Router


class PrefillChoice(NamedTuple):
    """A chosen prefill instance, with the prompt tokens to reuse, the prefix to fetch and the predicted TTFT."""

    instance: str
    reused_tokens: int
    fetch: PrefixFetch | None
    ttft_s: float


@mypyc_attr(allow_interpreted_subclasses=True)
class ForecastingRouter(Router):
    """Base class of routers that choose the prefill instance by a load forecast."""

    needs_forecast: ClassVar[bool] = True

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        forecast = pools.forecast
        if forecast is None:
            raise RuntimeError("the router needs a forecast")
        # Without a prefill pool, one mixed instance runs both phases. Decode is placed by least reserved memory.
        splits = len(pools.prefill) > 0
        prefill = self.choose(request, pools.prefill if splits else pools.mixed, forecast, now)
        if prefill is None:
            return None
        decode = prefill.instance
        if splits:
            least = pools.decode.least(reserved_tokens) or pools.mixed.least(reserved_tokens)
            if least is None:
                return None
            decode = least.id
        return Route(prefill.instance, decode, (), prefill.reused_tokens, prefill.fetch, prefill.ttft_s)

    @abstractmethod
    def choose(self, request: Request, pool: Pool, forecast: ClusterForecast, now: float) -> PrefillChoice | None:
        """Choose the prefill instance of a request; None if the pool is empty."""


class ShortestPredictedQueue(ForecastingRouter):
    """Picks the prefill instance with the shortest predicted queue."""

    def choose(self, request: Request, pool: Pool, forecast: ClusterForecast, now: float) -> PrefillChoice | None:
        # Of equal queues, the instance that has received the least prefill time so far. Reused blocks do not count.
        chosen: InstanceLoad | None = None
        least_s = assigned_s = 0.0
        for load in pool:
            queue_s, so_far_s = forecast.queue_s(load.id, now), forecast.assigned_s(load.id)
            if chosen is None or queue_s < least_s or (queue_s == least_s and so_far_s < assigned_s):
                chosen, least_s, assigned_s = load, queue_s, so_far_s
        if chosen is None:
            return None
        blocks = forecast.cached_blocks(chosen, request.prefix_blocks)
        reused = forecast.reused_tokens(blocks, request.prompt_tokens)
        prefill_s = forecast.prediction(chosen.id).prefill_s(request.prompt_tokens, reused)
        return PrefillChoice(chosen.id, reused, None, least_s + prefill_s)


class Conductor(ForecastingRouter):
    """Router that picks the prefill instance with the least predicted TTFT.

    Implements algorithm 1 of Mooncake (arXiv 2407.00079, section 6), but an instance fetches a longer prefix from
    another cache whenever this lowers the predicted TTFT; the paper's threshold would exclude the last output of a
    session, which is short beside its prompt. Without `fetches`, instances fetch nothing.
    """

    reads_prefix_caches: ClassVar[bool] = True

    def __init__(self, fetches: bool = True) -> None:
        self._fetches = fetches

    def choose(self, request: Request, pool: Pool, forecast: ClusterForecast, now: float) -> PrefillChoice | None:
        prompt = request.prompt_tokens
        found = forecast.matches(request.prefix_blocks)
        best = found.longest
        chosen: InstanceLoad | None = None
        chosen_blocks, ttft_s, assigned_s = 0, 0.0, 0.0
        for load in pool:
            blocks, prediction = found.cached_blocks(load), forecast.prediction(load.id)
            queue_s = forecast.queue_s(load.id, now)
            this_s = queue_s + prediction.prefill_s(prompt, forecast.reused_tokens(blocks, prompt))
            if self._fetches and best > blocks:
                transfer_s = prediction.transfer_s((best - blocks) * forecast.block_tokens)
                prefill_s = prediction.prefill_s(prompt, forecast.reused_tokens(best, prompt))
                fetching_s = max(queue_s, transfer_s) + prefill_s
                # In the paper, an instance fetches even if computing is faster, and only after the wait in the queue.
                if fetching_s < this_s:
                    blocks, this_s = best, fetching_s
            so_far_s = forecast.assigned_s(load.id)
            if chosen is None or this_s < ttft_s or (this_s == ttft_s and so_far_s < assigned_s):
                chosen, chosen_blocks, ttft_s, assigned_s = load, blocks, this_s, so_far_s
        if chosen is None:
            return None
        fetch = PrefixFetch(found.source, best) if chosen_blocks > found.cached_blocks(chosen) else None
        return PrefillChoice(chosen.id, forecast.reused_tokens(chosen_blocks, prompt), fetch, ttft_s)
