"""Load balance: the baseline that knows what waits, and not what is in the caches."""

from twofold.instance import InstanceLoad
from twofold.request import Request
from twofold.scheduling.forecast import Forecast
from twofold.scheduling.pools import Pool
from twofold.scheduling.routers.forecasting import Forecasting, Prefill


class LeastQueue(Forecasting):
    """Prefill goes where what was placed is predicted to be done first; among equals, to who was given least so far.

    Blocks that happen to be in the cache there are reused, but play no part in the choice.
    """

    def choose(self, request: Request, pool: Pool, forecast: Forecast, now: float) -> Prefill | None:
        chosen: InstanceLoad | None = None
        least_s = given_s = 0.0
        for load in pool:
            queue_s, so_far_s = forecast.queue_s(load.id, now), forecast.given_s(load.id)
            if chosen is None or queue_s < least_s or (queue_s == least_s and so_far_s < given_s):
                chosen, least_s, given_s = load, queue_s, so_far_s
        if chosen is None:
            return None
        blocks = forecast.found_by(chosen, request.prefix_blocks)
        reused = forecast.reused_tokens(blocks, request.prompt_tokens)
        prefill_s = forecast.of(chosen.id).prefill_s(request.prompt_tokens, reused)
        return Prefill(chosen.id, reused, None, least_s + prefill_s)
