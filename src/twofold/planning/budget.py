"""What a design may cost: machines, dollars per hour and watts."""

from collections.abc import Callable

import msgspec

from twofold.errors import ConfigurationError
from twofold.planning.design import Design, Family

Allows = Callable[[Design], bool]
_SLACK = 1.0 + 1e-9  # sums of prices are not exact
# More is a slip of the keyboard, or a search that no number of machines can end.
MOST_MACHINES = 100_000


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds, all of which hold; None and an empty `of_kind` bound nothing.

    `of_kind` maps the name of a machine to how many of it there may be.
    """

    machines: int | None = None
    price_per_h: float | None = None
    tdp_w: float | None = None
    of_kind: dict[str, int] = {}

    @property
    def bounded(self) -> bool:
        return any((self.machines is not None, self.price_per_h is not None, self.tdp_w is not None))

    def bounds(self, family: Family) -> bool:
        """Whether the family cannot grow without end."""
        return self.bounded or all(kind.name in self.of_kind for kind in family.kinds)

    def allows(self, design: Design) -> bool:
        within = (
            (design.machines, self.machines),
            (design.price_per_h, self.price_per_h),
            (design.tdp_w, self.tdp_w),
        )
        if any(bound is not None and value > bound * _SLACK for value, bound in within):
            return False
        return all(self._used(design, name) <= most for name, most in self.of_kind.items())

    def require_sensible(self) -> None:
        """Raise ConfigurationError for a bound that lets nothing through."""
        for flag, value in (
            ("--max-machines", self.machines),
            ("--max-cost", self.price_per_h),
            ("--max-power", None if self.tdp_w is None else self.tdp_w / 1e3),
        ):
            if value is not None and not 0 < value < float("inf"):
                raise ConfigurationError(f"{flag} {value:g} leaves no machine to plan with: give more than 0")
        for most in filter(None, (self.machines, *self.of_kind.values())):
            if most > MOST_MACHINES:
                raise ConfigurationError(
                    f"--max-machines {most} is more than a plan can look at: give at most {MOST_MACHINES}"
                )
        for name, most in self.of_kind.items():
            if most < 1:
                raise ConfigurationError(
                    f"--max-machines {name}={most} leaves none of it: give at least 1, or plan without {name}"
                )

    @staticmethod
    def _used(design: Design, name: str) -> int:
        return sum(count for kind, count in design.parts() if kind.name == name)


def frontier(family: Family, allows: Allows) -> list[Design]:
    """The largest designs that `allows` lets through: none of them has more of one kind at no less of the other.

    By rising count of the first kind. `allows` is monotone: what it refuses, it refuses with more machines too.
    Empty where not even one machine of each kind is allowed.
    """
    if not family.split:
        most = _most(lambda count: allows(Design(family=family, counts=(count,))))
        return [Design(family=family, counts=(most,))] if most else []
    designs: list[Design] = []
    for first in range(1, MOST_MACHINES):
        second = _most(lambda count, first=first: allows(Design(family=family, counts=(first, count))))  # type: ignore[misc]
        if not second:
            break
        if designs and designs[-1].counts[1] == second:
            designs.pop()
        designs.append(Design(family=family, counts=(first, second)))
    return designs


def _most(allowed: Callable[[int], bool]) -> int:
    """The greatest count from 0 on that is allowed; 0 is."""
    low, high = 0, 1
    while allowed(high):
        low, high = high, high * 2
        if high > MOST_MACHINES:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low
