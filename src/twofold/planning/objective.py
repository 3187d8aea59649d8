"""What a plan is after."""

from enum import StrEnum

from twofold.planning.cheapest import Weigh, by_accelerators, by_power, by_price


class Objective(StrEnum):
    """Most requests per second within a budget, or least dollars or watts at a rate; or, with parallelism of its own
    for each phase, most requests per second and accelerator (DistServe's goodput)."""

    THROUGHPUT = "throughput"
    COST = "cost"
    POWER = "power"
    GOODPUT = "goodput"

    @property
    def weigh(self) -> Weigh:
        """What designs are compared by at one rate: watts or accelerators where they count, else dollars."""
        if self is Objective.GOODPUT:
            return by_accelerators
        return by_power if self is Objective.POWER else by_price
