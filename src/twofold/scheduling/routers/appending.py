"""Router that prefills on decode instances where these cache most of the prompt (append-prefill)."""

from typing import ClassVar, Final

from twofold.events import Route
from twofold.request import Request
from twofold.scheduling.cluster.pools import Pools
from twofold.scheduling.routers.forecasting import Conductor

LEAST_SHARE: Final = 0.5


class AppendPrefill(Conductor):
    """Conductor that may also prefill a prompt on a decode instance, which then needs no hand-off.

    A decode instance with room may compute the prompt if it caches at least the share `least_share` of it. Each of its
    decodes then waits for the prompt. A decode instance is chosen if its predicted TTFT and these waits are together no
    longer than the TTFT of the best prefill instance. The waits are spread over the iterations of the prompt, so decode
    instances need a batcher that limits the prompt tokens of an iteration.
    """

    appends: ClassVar[bool] = True

    def __init__(self, least_share: float = LEAST_SHARE) -> None:
        super().__init__()
        self._least_share = least_share

    def route(self, request: Request, tokens: int, pools: Pools, now: float) -> Route | None:
        route, forecast, prompt = super().route(request, tokens, pools, now), pools.forecast, request.prompt_tokens
        if route is None or route.ttft_s is None or forecast is None:
            return route
        found = forecast.matches(request.prefix_blocks)
        chosen, least_s = route, route.ttft_s
        reserved = -1  # by the requests of the chosen decode instance
        for load in pools.decode:
            reused = forecast.reused_tokens(found.cached_blocks(load), prompt)
            full = load.capacity_tokens is not None and load.reserved_tokens + tokens > load.capacity_tokens
            if full or reused < self._least_share * prompt:
                continue
            prefill_s = forecast.prediction(load.id).prefill_s(prompt, reused)
            ttft_s = forecast.queue_s(load.id, now) + prefill_s
            total_s = ttft_s + load.decoding * prefill_s
            # Of equals, a decode instance, which saves the hand-off, and of these the one with least reserved memory.
            if total_s < least_s or (total_s == least_s and not 0 <= reserved <= load.reserved_tokens):
                chosen = Route(load.id, load.id, (), reused, None, ttft_s)
                least_s, reserved = total_s, load.reserved_tokens
        return chosen
