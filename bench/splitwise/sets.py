"""Find the highest request rate at which each Splitwise cluster design meets the paper's nine SLOs.

The cluster designs form sets of equal power or equal cost (section 6).
"""

import asyncio
from collections.abc import Sequence

import msgspec
from designs import BASELINE_A100, BASELINE_H100, KINDS, SETS, Kind, PaperSet, power_units
from show import progress, split_name, table, times
from study import BestDesign, Settings, Study, study, timings

from twofold.hardware.catalog import Catalog
from twofold.planning.design import Design


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """Cluster designs with their highest request rates, as found with one performance model.

    - `paper`: designs by kind, with the machine counts of the Splitwise paper
    - `tuned`: designs by kind; the planner chose the machine counts of split designs, and baselines have the
      paper's counts
    """

    paper: dict[str, BestDesign]
    tuned: dict[str, BestDesign]


def design_sets(settings: Settings, catalog: Catalog, names: Sequence[str]) -> dict[str, dict[str, Column]]:
    """Print the highest rate of each design, in a table for each set of designs of equal power or cost.

    Return the designs of the sets with these names, by set and workload and by timing.
    """
    found = {}
    for each in SETS:
        if each.name not in names:
            continue
        columns = {}
        for timing in timings(settings, catalog).values():
            with study(timing, each.workload, settings, catalog) as searches:
                columns[timing.name] = asyncio.run(_column(searches, each))
            progress(f"{each.name} {each.workload}: {timing.name} done")
        _show(each, columns, catalog)
        found[f"{each.name} {each.workload}"] = columns
    return found


def model_errors(settings: Settings, catalog: Catalog) -> None:
    """Print the errors of the performance models of SplitwiseSim and of Twofold, relative to measurements."""
    for timing in timings(settings, catalog).values():
        with study(timing, "conv", settings, catalog) as searches:
            print(f"\nModels of the {timing.name} timing:\n")
            print("\n".join(f"- {line}" for line in searches.errors()))


async def _column(searches: Study, each: PaperSet) -> Column:
    known = [kind for kind in KINDS if kind.name in each.counts]
    paper = await asyncio.gather(*(searches.capacity(kind, each.counts[kind.name]) for kind in known))
    tuned = await asyncio.gather(*(_tuned(searches, each, kind) for kind in KINDS))
    return Column(
        paper={kind.name: found for kind, found in zip(known, paper, strict=True)},
        tuned={kind.name: found for kind, found in zip(KINDS, tuned, strict=True)},
    )


async def _tuned(searches: Study, each: PaperSet, kind: Kind) -> BestDesign:
    if not kind.split:
        return await searches.capacity(kind, each.counts[kind.name])
    return await searches.tuned(kind, each.name)


def _show(each: PaperSet, columns: dict[str, Column], catalog: Catalog) -> None:
    header = ["cluster", "$/h", "power units", "TDP kW"]
    for name in columns:
        header += [f"{name}: paper's split", "tuned split", "req/s", "÷ H100", "÷ A100"]
    rows = [_row(kind, each, columns, catalog) for kind in KINDS]
    table(f"{each.name}, {each.workload}", header, rows)


def _row(kind: Kind, each: PaperSet, columns: dict[str, Column], catalog: Catalog) -> Sequence[str]:
    first = next(iter(columns.values()))
    row = [kind.name, *_costs((first.paper.get(kind.name) or first.tuned[kind.name]).design, catalog)]
    for column in columns.values():
        paper, tuned = column.paper.get(kind.name), column.tuned[kind.name]
        h100, a100 = (column.tuned[base.name].rate for base in (BASELINE_H100, BASELINE_A100))
        row += [
            "—" if paper is None else f"{split_name(each.counts[kind.name])}: {paper.rate:.1f}",
            split_name(tuned.design.counts),
            f"{tuned.rate:.1f}",
            times(tuned.rate, h100),
            times(tuned.rate, a100),
        ]
    return row


def _costs(design: Design, catalog: Catalog) -> tuple[str, str, str]:
    units = power_units(design, catalog)
    return f"{design.price_per_h:,.0f}", f"{units:,.0f}", f"{design.tdp_w / 1e3:.0f}"
