"""What routers have in common that go by predictions: how they pick the other instance, and what they answer.

Load balance: the baseline that knows what waits, and not what is in the caches.
"""

from abc import abstractmethod
from typing import ClassVar

from mypy_extensions import mypyc_attr

from twofold.instance import InstanceLoad
from twofold.placement import PrefixFetch, Route
from twofold.request import Request
from twofold.scheduling.cluster.forecast import ClusterForecast
from twofold.scheduling.cluster.pools import Pool, Pools, reserved_tokens
from twofold.scheduling.cluster.router import FixedRoles


class PrefillChoice:
    """Where a prompt is to be computed, with how many of its tokens reused, and when its first token is expected."""

    __slots__ = ("fetch", "instance", "reused_tokens", "ttft_s")

    def __init__(self, instance: str, reused_tokens: int, fetch: PrefixFetch | None, ttft_s: float) -> None:
        self.instance = instance
        self.reused_tokens = reused_tokens
        self.fetch = fetch
        self.ttft_s = ttft_s


@mypyc_attr(allow_interpreted_subclasses=True)
class ForecastingRouter(FixedRoles):
    """Prefill goes where `choose` says, and decode to the instance with the least reserved memory.

    Where there is no prefill pool, one mixed instance does both.
    """

    needs_forecast: ClassVar[bool] = True

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        forecast = pools.forecast
        if forecast is None:
            raise RuntimeError("a router that goes by predictions was given none")
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
    def choose(
        self, request: Request, pool: Pool, forecast: ClusterForecast, now: float
    ) -> PrefillChoice | None:
        """None where the pool is empty."""
        ...


class ShortestPredictedQueue(ForecastingRouter):
    """Prefill goes where what was placed is predicted to be done first; among equals, to who was given least so far.

    Blocks that happen to be in the cache there are reused, but play no part in the choice.
    """

    def choose(
        self, request: Request, pool: Pool, forecast: ClusterForecast, now: float
    ) -> PrefillChoice | None:
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
