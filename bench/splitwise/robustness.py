"""Robustness (Splitwise, section 6): clusters that serve a workload other than the one they were tuned for."""

import asyncio

from designs import KINDS, WORKLOADS, Kind, paper_set
from show import percent, progress, split_name, table
from study import BestDesign, Settings, Study, study, timings

from twofold.hardware.catalog import Catalog

_HEADER = ("cluster", "workload", "tuned for this one", "req/s", "tuned for the other", "req/s", "loss")


def robustness(settings: Settings, catalog: Catalog) -> None:
    """Print the highest request rate of iso-power designs within the SLOs, for two workloads.

    Each design is tuned for one of the workloads.
    """
    for timing in timings(settings, catalog).values():
        own: dict[str, dict[str, BestDesign]] = {}
        for workload in WORKLOADS:
            with study(timing, workload, settings, catalog) as searches:
                own[workload] = asyncio.run(_own(searches, workload))
        rows = []
        for workload in WORKLOADS:
            with study(timing, workload, settings, catalog) as searches:
                rows += asyncio.run(_rows(searches, workload, own))
            progress(f"robustness, {workload}: {timing.name} done")
        table(f"Robustness: iso-power, {timing.name} timing", _HEADER, rows)


async def _own(searches: Study, workload: str) -> dict[str, BestDesign]:
    kinds = [kind for kind in KINDS if kind.split]
    found = await asyncio.gather(*(_tuned(searches, kind, workload) for kind in kinds))
    return {kind.name: each for kind, each in zip(kinds, found, strict=True)}


async def _tuned(searches: Study, kind: Kind, workload: str) -> BestDesign:
    if searches.timing.name == "published":
        return await searches.capacity(kind, paper_set("iso-power", workload).counts[kind.name])
    return await searches.tuned(kind, "iso-power")


async def _rows(searches: Study, workload: str, own: dict[str, dict[str, BestDesign]]) -> list[list[str]]:
    other = next(each for each in WORKLOADS if each != workload)
    kinds = [kind for kind in KINDS if kind.split]
    crossed = await asyncio.gather(*(searches.capacity(kind, own[other][kind.name].design.counts) for kind in kinds))
    return [
        [
            kind.name,
            workload,
            split_name(own[workload][kind.name].design.counts),
            f"{own[workload][kind.name].rate:.1f}",
            split_name(found.design.counts),
            f"{found.rate:.1f}",
            percent(found.rate, own[workload][kind.name].rate),
        ]
        for kind, found in zip(kinds, crossed, strict=True)
    ]
