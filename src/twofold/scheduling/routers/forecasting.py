"""What routers have in common that go by predictions: how they pick the other instance, and what they answer."""

from abc import abstractmethod

from mypy_extensions import mypyc_attr

from twofold.request import Request
from twofold.scheduling.forecast import Forecast
from twofold.scheduling.pools import Pool, Pools, reserved_tokens
from twofold.scheduling.router import Fetch, FixedRoles, Route


class Prefill:
    """Where a prompt is to be computed, with how many of its tokens reused, and when its first token is expected."""

    __slots__ = ("fetch", "instance", "reused_tokens", "ttft_s")

    def __init__(self, instance: str, reused_tokens: int, fetch: Fetch | None, ttft_s: float) -> None:
        self.instance = instance
        self.reused_tokens = reused_tokens
        self.fetch = fetch
        self.ttft_s = ttft_s


@mypyc_attr(allow_interpreted_subclasses=True)
class Forecasting(FixedRoles):
    """Prefill goes where `choose` says, and decode to the instance with the least reserved memory.

    Where there is no prefill pool, one mixed instance does both.
    """

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
    def choose(self, request: Request, pool: Pool, forecast: Forecast, now: float) -> Prefill | None:
        """None where the pool is empty."""
        ...
