"""Claims of Splitwise's abstract, checked with the performance models of SplitwiseSim and of Twofold."""

import asyncio

import msgspec
from designs import AA, BASELINE_A100, BASELINE_H100, H100_MACHINES, HHCAP, WORKLOADS, Kind, power_units, within
from show import percent, progress, split_name, table, times
from study import BestDesign, Settings, Study, study, timings

from twofold.hardware.catalog import Catalog
from twofold.planning.design import Allows, Design

_A100_MACHINES = 70


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Claim that a split design has a higher rate than baseline machines of similar cost and power."""

    text: str
    kind: Kind
    against: Kind
    machines: int  # of the baseline
    price: float  # maximum cost relative to the baseline
    power: float  # maximum power relative to the baseline; also at most the power of 40 DGX-H100


CLAIMS = (
    Claim(
        text="1.4× throughput, cost −20%", kind=AA, against=BASELINE_H100, machines=H100_MACHINES, price=0.82, power=1.0
    ),
    Claim(
        text="2.35× (section 6: 2.15×), same cost and power",
        kind=AA,
        against=BASELINE_A100,
        machines=_A100_MACHINES,
        price=1.0,
        power=1.0,
    ),
    Claim(
        text="1.76×, power −15%, same cost",
        kind=HHCAP,
        against=BASELINE_H100,
        machines=H100_MACHINES,
        price=1.0,
        power=0.85,
    ),
)
_HEADER = ("claim", "workload", "timing", "cluster", "req/s", "baseline", "req/s", "×", "cost", "power")


def headlines(settings: Settings, catalog: Catalog) -> None:
    """Print each throughput gain claimed in the abstract of the Splitwise paper next to the simulated gain."""
    rows = []
    for workload in WORKLOADS:
        for timing in timings(settings, catalog).values():
            with study(timing, workload, settings, catalog) as searches:
                rows += asyncio.run(_rows(searches, workload))
            progress(f"headlines, {workload}: {timing.name} done")
    table("Headlines", _HEADER, sorted(rows, key=lambda row: [claim.text for claim in CLAIMS].index(row[0])))


async def _rows(searches: Study, workload: str) -> list[list[str]]:
    return list(await asyncio.gather(*(_row(searches, claim, workload) for claim in CLAIMS)))


async def _row(searches: Study, claim: Claim, workload: str) -> list[str]:
    catalog = searches.problem.catalog
    base = await searches.capacity(claim.against, (claim.machines,))
    found = await searches.best(claim.kind, _allowed(claim, base, catalog))
    units, base_units = (power_units(each.design, catalog) for each in (found, base))
    return [
        claim.text,
        workload,
        searches.timing.name,
        f"{claim.kind.name} {split_name(found.design.counts)}",
        f"{found.rate:.1f}",
        f"{claim.against.name} {claim.machines}",
        f"{base.rate:.1f}",
        times(found.rate, base.rate),
        percent(found.design.price_per_h, base.design.price_per_h),
        percent(units, base_units),
    ]


def _allowed(claim: Claim, base: BestDesign, catalog: Catalog) -> Allows:
    most_units = claim.power * power_units(base.design, catalog) + 1e-6
    most_price = claim.price * base.design.price_per_h + 1e-6
    equal_power = within("iso-power", catalog)

    def allows(design: Design) -> bool:
        cheap = design.price_per_h <= most_price and power_units(design, catalog) <= most_units
        return cheap and equal_power(design)

    return allows
