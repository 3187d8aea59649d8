"""Measurements in the Splitwise profile, grouped by model, machine and tensor parallelism."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from twofold.hardware.catalog import load_catalog
from twofold.hardware.specs import Machine, Model
from twofold.performance.fitting.profile import ProfiledBatch, consistent_batches, read_profile

MACHINES = {"a100-80gb": "dgx-a100", "h100-80gb": "dgx-h100"}  # the capped rows are synthetic


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one model on one machine at one tensor parallelism."""

    model: Model
    machine: Machine
    tensor_parallel: int
    kept: list[ProfiledBatch]


def measured_pairs(profile: Path) -> Iterator[Pair]:
    """Yield the A100 and H100 measurements in a profile, one group for each combination of model, machine
    and tensor parallelism.
    """
    catalog = load_catalog()
    rows = read_profile(profile)
    for model, hardware, tensor_parallel in sorted({row.pair for row in rows if row.hardware in MACHINES}):
        pair = (model, hardware, tensor_parallel)
        yield Pair(
            model=catalog.model(model),
            machine=catalog.machine(MACHINES[hardware]),
            tensor_parallel=tensor_parallel,
            kept=consistent_batches([row for row in rows if row.pair == pair])[0],
        )
