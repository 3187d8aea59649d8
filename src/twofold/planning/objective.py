"""What a plan is after."""

from enum import StrEnum

from twofold.planning.cheapest import Weigh, by_power, by_price


class Objective(StrEnum):
    """Most requests per second within a budget, or least dollars or watts at a rate."""

    THROUGHPUT = "throughput"
    COST = "cost"
    POWER = "power"

    @property
    def weigh(self) -> Weigh:
        """What designs are compared by at one rate: watts where they are the objective, else dollars."""
        return by_power if self is Objective.POWER else by_price
