"""`twofold characterize FILE.csv`: fit performance profiles to the measurements in a CSV file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from twofold.characterize.analysis import Characterization, InstanceFacts, characterization, measured_power
from twofold.characterize.target import TargetLimits
from twofold.cli.characterize.settings import CharacterizeSettings
from twofold.errors import ConfigurationError, require
from twofold.hardware.catalog import Catalog
from twofold.hardware.hf_config import read_model
from twofold.hardware.specs import Machine, Model
from twofold.performance.fitting.profile import ProfileRow, date_of, read_profile
from twofold.performance.instance import kv_capacity_tokens, profile_name
from twofold.performance.profile import KvLink, MachineCosts
from twofold.performance.transfer import default_sync_s

_MEMORY_UTILIZATION: Final = 0.9


def analyse(settings: CharacterizeSettings, catalog: Catalog) -> list[Characterization]:
    """Read the profile (CSV) and fit each pair of model and hardware that the flags select."""
    path = Path(settings.target)
    groups: dict[tuple[str, str, int], list[ProfileRow]] = {}
    for row in read_profile(path):
        chosen = not settings.hardware or row.hardware in settings.hardware
        if chosen and settings.model in (None, row.model) and settings.tp in (None, row.tensor_parallel):
            groups.setdefault(row.pair, []).append(row)
    require(bool(groups), f"{path} has no such measurements: check --model, --hardware and --tp")
    return [_of_rows(settings, catalog, groups[pair]) for pair in sorted(groups)]


def _of_rows(settings: CharacterizeSettings, catalog: Catalog, rows: Sequence[ProfileRow]) -> Characterization:
    name, hardware, parallel = rows[0].pair
    model = _sizes_of(settings, catalog, name)
    machine = next((each for each in catalog.machines.values() if hardware in (each.name, profile_name(each))), None)
    capacity = settings.kv_capacity_tokens
    if capacity is None and machine is None:
        raise ConfigurationError(f"the catalog has no machine with {hardware}: give --kv-capacity-tokens")
    if capacity is None and machine is not None:
        capacity = kv_capacity_tokens(model, machine, parallel, _MEMORY_UTILIZATION)
    facts = InstanceFacts(
        model=model,
        engine="",
        kv_capacity_tokens=capacity or 0,
        source=settings.target,
        date=date_of(Path(settings.target), rows),
        costs=_costs(settings, machine, parallel),
        link=None if machine is None else _link(machine, parallel),
    )
    limits = TargetLimits(max_model_len=model.max_context or 1 << 30)
    tdp_w = settings.tdp_w if machine is None else parallel * machine.accelerator.tdp_w
    return characterization(rows, limits, facts, measured_power(rows, tdp_w, settings.target))


def _sizes_of(settings: CharacterizeSettings, catalog: Catalog, name: str) -> Model:
    if settings.model_sizes is None:
        return catalog.model(name)
    if settings.model_sizes in catalog.models:
        return catalog.model(settings.model_sizes)
    return msgspec.structs.replace(read_model(Path(settings.model_sizes)), name=name)


def _costs(settings: CharacterizeSettings, machine: Machine | None, parallel: int) -> MachineCosts:
    part = 0.0 if machine is None else parallel / machine.count
    names = MachineCosts.__struct_fields__
    return MachineCosts(**{name: getattr(settings, name) or part * getattr(machine, name, 0.0) for name in names})


def _link(machine: Machine, parallel: int) -> KvLink:
    bytes_per_s = machine.network_bytes_per_s * parallel / machine.count
    return KvLink(bytes_per_s=bytes_per_s, latency_s=0.0, sync_s=default_sync_s(bytes_per_s))
