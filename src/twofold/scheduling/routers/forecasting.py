"""Routers that use predictions: their base class, and routing by predicted queue length."""

from abc import abstractmethod
from typing import ClassVar, NamedTuple

from mypy_extensions import mypyc_attr

from twofold.events import PrefixFetch, Route
from twofold.instance import InstanceLoad
from twofold.request import Request
from twofold.scheduling.cluster.forecast import ClusterForecast
from twofold.scheduling.cluster.pools import Pool, Pools, reserved_tokens
from twofold.scheduling.cluster.router import Router


class PrefillChoice(NamedTuple):
    """A prefill instance with the prompt tokens it reuses and the predicted TTFT."""

    instance: str
    reused_tokens: int
    fetch: PrefixFetch | None
    ttft_s: float


@mypyc_attr(allow_interpreted_subclasses=True)
class ForecastingRouter(Router):
    """`choose` picks the prefill instance; decode goes to the instance with the least reserved memory.

    Without a prefill pool, one mixed instance runs both phases.
    """

    needs_forecast: ClassVar[bool] = True

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        forecast = pools.forecast
        if forecast is None:
            raise RuntimeError("the router needs a forecast")
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
        """Pick the prefill instance; None if the pool is empty."""


class ShortestPredictedQueue(ForecastingRouter):
    """Picks the prefill instance with the shortest predicted queue, then the least prefill time assigned so far.

    Cached blocks are reused but do not affect the choice.
    """

    def choose(self, request: Request, pool: Pool, forecast: ClusterForecast, now: float) -> PrefillChoice | None:
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
