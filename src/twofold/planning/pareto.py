"""The Pareto front: designs that none other beats at once in rate, dollars and watts."""

from collections.abc import Iterable

import msgspec

from twofold.planning.design import Design


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A design that keeps the SLO at `rate` requests per second."""

    design: Design
    rate: float

    def covers(self, other: "Point") -> bool:
        """Whether nothing speaks for the other."""
        mine, others = self.design, other.design
        return (
            self.rate >= other.rate and mine.price_per_h <= others.price_per_h and mine.tdp_w <= others.tdp_w
        )


def pareto_front(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points that no other covers, by rising rate; of equal ones the first by name."""
    front: list[Point] = []
    # A point can only be covered by one that comes before it in this order.
    for point in sorted(points, key=_order):
        if not any(other.covers(point) for other in front):
            front.append(point)
    return tuple(reversed(front))


def _order(point: Point) -> tuple[float, float, float, int, str]:
    design = point.design
    return -point.rate, design.price_per_h, design.tdp_w, design.machines, design.name
