"""Conversion of the flags of `twofold simulate` to a cluster spec."""

import math
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from twofold.cli.simulate.settings import SimulateSettings
from twofold.cluster.file import load_cluster, parse_cluster
from twofold.cluster.spec import ClusterSpec, ControlSpec, InstanceFailure
from twofold.cluster.validation import MAX_SECONDS, MIN_BYTES_PER_S
from twofold.errors import ConfigurationError, require
from twofold.hardware.catalog import Catalog
from twofold.instance import Role
from twofold.performance.profile import load_profiles
from twofold.reporting.output import same_fields
from twofold.scheduling.cluster.shared import OwnLoad

_FAILURE: Final = re.compile(r"(?P<instance>[^@]+)@(?P<at>[^+]+)(?:\+(?P<away>.+))?")
_FILES: Final = {".yaml", ".yml", ".toml"}


def cluster_spec(settings: SimulateSettings, catalog: Catalog) -> tuple[ClusterSpec, Catalog]:
    """Return the cluster spec and the hardware catalog for these flags. Raises ConfigurationError for invalid flags."""
    model, given = settings.model, _overrides(settings)
    if settings.profiles:
        given["profiles"] = paths = tuple(str(path) for path in settings.profiles)
        for measured in load_profiles(paths):  # the catalog also gets the measured machines and models
            catalog, model = measured.extend(catalog), model or measured.model.name
    if model is not None:
        given["model"] = model
    spec = _read_cluster(settings.cluster, model, catalog)
    control = _control(settings, spec)
    if control is not None:
        given["control"] = control
    spec = msgspec.structs.replace(spec, **given)
    return with_spare(with_batchers(spec, settings.batcher or {}), settings.spare), catalog


def with_batchers(spec: ClusterSpec, batchers: dict[Role, str]) -> ClusterSpec:
    """Return a copy of the cluster with other batchers. `batchers` maps roles of pools to names of batchers."""
    if not batchers:
        return spec
    pools = [msgspec.structs.replace(pool, batcher=batchers.get(pool.role, pool.batcher)) for pool in spec.pools]
    return msgspec.structs.replace(spec, pools=tuple(pools))


def with_spare(spec: ClusterSpec, machines: int) -> ClusterSpec:
    """Return a copy of the cluster with `machines` spare machines, added as a decode pool."""
    if not machines:
        return spec
    spare = msgspec.structs.replace(spec.pools[0], machines=machines, role=Role.DECODE)
    return msgspec.structs.replace(spec, pools=(*spec.pools, spare))


def parse_failure(text: str) -> InstanceFailure:
    """Parse a failure `INSTANCE@SECONDS` or `INSTANCE@SECONDS+RESTART_DELAY`. Raises ConfigurationError."""
    found = _FAILURE.fullmatch(text.strip())
    at_s = _seconds(found["at"]) if found else None
    away_s = _seconds(found["away"]) if found and found["away"] is not None else None
    if found is None or at_s is None or (found["away"] is not None and not away_s):
        raise ConfigurationError(
            f"--fail {text} is not understood: write decode-0@30 for a failure at 30 s, or decode-0@30+60"
        )
    return InstanceFailure(instance=found["instance"], at_s=at_s, back_s=None if away_s is None else at_s + away_s)


def _read_cluster(text: str | None, model: str | None, catalog: Catalog) -> ClusterSpec:
    if text is None:
        raise ConfigurationError("give --cluster, as in 35xh100:prefill,5xh100:decode, or a cluster file")
    if Path(text).suffix.lower() in _FILES:
        return load_cluster(Path(text), catalog=catalog)
    if model is None:
        raise ConfigurationError("--cluster names no model: give --model, as in bloom-176b")
    return parse_cluster(text, model=model, catalog=catalog)


def _overrides(settings: SimulateSettings) -> dict[str, Any]:
    values = same_fields(ClusterSpec, settings, without=("model", "profiles"))
    values["swap_space_bytes"] = settings.swap_space
    if settings.link_gb_per_s is not None:
        values["link_bytes_per_s"] = link_bytes_per_s(settings.link_gb_per_s)
    if settings.fail:
        values["failures"] = tuple(map(parse_failure, settings.fail))
    return {name: value for name, value in values.items() if value is not None}


def link_bytes_per_s(gigabytes: float) -> float:
    """Convert --link-gb-per-s to bytes per second. Raises ConfigurationError if it is out of range."""
    require(0 < gigabytes < math.inf, f"--link-gb-per-s {gigabytes:g} is out of range: give more than 0")
    if gigabytes * 1e9 < MIN_BYTES_PER_S:
        raise ConfigurationError(f"--link-gb-per-s {gigabytes:g} is too slow: give at least {MIN_BYTES_PER_S / 1e9:g}")
    return gigabytes * 1e9


def _control(settings: SimulateSettings, spec: ClusterSpec) -> ControlSpec | None:
    values = {
        "controllers": settings.controllers,
        "reports_every_s": settings.reports_every,
        "report_delay_s": settings.report_delay,
        "own_load": None if settings.own_load is None else OwnLoad(settings.own_load),
    }
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if not given:
        return None
    before = spec.control if isinstance(spec.control, ControlSpec) else ControlSpec()
    return msgspec.structs.replace(before, **given)


def _seconds(text: str) -> float | None:
    """Parse a time in seconds; return None if it is invalid."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= MAX_SECONDS else None
