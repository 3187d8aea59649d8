"""Cluster designs of Splitwise (ISCA'24, section 6) and their budgets."""

from collections.abc import Sequence
from typing import Final

import msgspec

from twofold.hardware.catalog import Catalog
from twofold.planning.design import Allows, Design, Family, MachineKind

H100: Final = "dgx-h100"
A100: Final = "dgx-a100"
CAPPED: Final = "dgx-h100-pcap"
# Power of 40 DGX-H100 in the units of the paper's notebooks, and their cost per hour; the paper's iso-power and
# iso-cost clusters are the largest within these budgets.
H100_MACHINES: Final = 40

WORKLOADS: Final = ("conv", "code")


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of cluster design in the paper: a machine type per phase, or one type for both (a baseline)."""

    name: str
    machines: tuple[str, ...]

    @property
    def split(self) -> bool:
        return len(self.machines) > 1


BASELINE_A100: Final = Kind(name="Baseline-A100", machines=(A100,))
BASELINE_H100: Final = Kind(name="Baseline-H100", machines=(H100,))
AA: Final = Kind(name="Splitwise-AA", machines=(A100, A100))
HH: Final = Kind(name="Splitwise-HH", machines=(H100, H100))
HA: Final = Kind(name="Splitwise-HA", machines=(H100, A100))
HHCAP: Final = Kind(name="Splitwise-HHcap", machines=(H100, CAPPED))
KINDS: Final = (BASELINE_A100, BASELINE_H100, AA, HH, HA, HHCAP)


class PaperSet(msgspec.Struct, frozen=True, kw_only=True):
    """Clusters of equal power or cost, tuned by the paper for one workload."""

    name: str
    workload: str
    counts: dict[str, tuple[int, ...]]


SETS: Final = (
    PaperSet(
        name="iso-power",
        workload="conv",
        counts={
            "Baseline-A100": (70,),
            "Baseline-H100": (40,),
            "Splitwise-AA": (45, 25),
            "Splitwise-HH": (25, 15),
            "Splitwise-HA": (25, 26),
            "Splitwise-HHcap": (25, 21),
        },
    ),
    PaperSet(
        name="iso-power",
        workload="code",
        counts={
            "Baseline-A100": (70,),
            "Baseline-H100": (40,),
            "Splitwise-AA": (55, 15),
            "Splitwise-HH": (35, 5),
            "Splitwise-HA": (35, 8),
            "Splitwise-HHcap": (35, 7),
        },
    ),
    PaperSet(
        name="iso-cost",
        workload="conv",
        counts={
            "Baseline-A100": (86,),
            "Baseline-H100": (40,),
            "Splitwise-AA": (51, 35),
            "Splitwise-HH": (25, 15),
            "Splitwise-HA": (30, 21),
            "Splitwise-HHcap": (30, 10),
        },
    ),
    PaperSet(
        name="iso-cost",
        workload="code",
        counts={
            "Baseline-A100": (86,),
            "Baseline-H100": (40,),
            "Splitwise-AA": (66, 20),
            "Splitwise-HH": (35, 5),
            "Splitwise-HA": (35, 10),
        },
    ),
)


def paper_set(name: str, workload: str) -> PaperSet:
    return next(each for each in SETS if (each.name, each.workload) == (name, workload))


def families(kind: Kind, catalog: Catalog, batching: Sequence[tuple[str, int | None]]) -> list[Family]:
    """Convert one of the paper's kinds of cluster design to families of the planner: a baseline has one for each
    batcher and token budget in `batching`.
    """
    kinds = tuple(machine_kind(name, catalog) for name in kind.machines)
    if kind.split:
        return [Family(kinds=kinds)]
    return [Family(kinds=kinds, batcher=batcher, max_num_batched_tokens=budget) for batcher, budget in batching]


def paper_designs(
    workload: str, catalog: Catalog, batching: Sequence[tuple[str, int | None]]
) -> list[tuple[str, Design]]:
    """Return the paper's iso-power clusters for a workload with their names: baselines once for each batcher."""
    counts = paper_set("iso-power", workload).counts
    return [
        (kind.name, Design(family=family, counts=counts[kind.name]))
        for kind in KINDS
        if kind.name in counts
        for family in families(kind, catalog, batching)
    ]


def machine_kind(name: str, catalog: Catalog) -> MachineKind:
    machine = catalog.machine(name)
    return MachineKind(name=machine.name, price_per_h=machine.price_per_h, tdp_w=machine.tdp_w)


def power_units(design: Design, catalog: Catalog) -> float:
    """Return a design's power in the relative units of SplitwiseSim's notebooks (44 for a DGX-H100)."""
    units = (count * (catalog.machine(kind.name).power_units or 0.0) for kind, count in design.parts())
    return round(sum(units), 6)


def within(name: str, catalog: Catalog) -> Allows:
    """Return a predicate that accepts designs within a budget: the power or the hourly cost of 40 DGX-H100 machines.

    `name` is `iso-power` or `iso-cost`.
    """
    h100 = catalog.machine(H100)
    if name == "iso-cost":
        return lambda design: design.price_per_h <= H100_MACHINES * h100.price_per_h
    most = H100_MACHINES * (h100.power_units or 0.0)
    return lambda design: power_units(design, catalog) <= most
