"""Cluster files (YAML or TOML) and pool strings such as `35xh100:prefill,5xh100:decode`."""

import re
from pathlib import Path
from typing import Final

import msgspec

from twofold.cluster.layout import check_shared_nodes, layout_of
from twofold.cluster.profiles import with_profiles
from twofold.cluster.spec import SATURATING, CacheSpec, ClusterSpec, ControlSpec, InstanceFailure, PoolSpec
from twofold.cluster.validation import check_numbers
from twofold.errors import ConfigurationError, require
from twofold.hardware.catalog import Catalog, load_catalog
from twofold.hardware.suggestions import explain_validation, parse_toml, parse_yaml, read_text, suggestion, unknown_name
from twofold.instance import Role
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.cluster.shared import OwnLoad

_POOL = re.compile(
    r"(?P<machines>\d{1,9})[x×](?P<machine>[^@:/\s]+)"
    r"(?:@(?:\d{1,4}[x×](?=TP))?(?:TP)?(?P<tensor_parallel>\d{1,4})(?:[x×](?:PP)?(?P<pipeline_parallel>\d{1,4}))?"
    r"(?:-?(?:ep|EP)(?P<expert_parallel>\d{1,4}))?)?"
    r"(?::(?P<role>[^/]*)(?:/(?P<batcher>.*))?)?"
)
_POOL_SYNTAX: Final = (
    "write pools as in 35xh100:prefill,5xh100:decode, or 4xh100@TP4:mixed/chunked-prefill, or 4xa100@2x4, "
    "or 2xh200@1ep8"
)
_MAX_MACHINES: Final = 1_000_000  # a typing error above this would exhaust memory
_SUFFIXES: Final = (".yaml", ".yml", ".json", ".toml")  # JSON is YAML
_YAML_KEY = re.compile(r"^([A-Za-z_]+)[ \t]*:", re.MULTILINE)


def parse_cluster(text: str, *, model: str, catalog: Catalog | None = None) -> ClusterSpec:
    """Parse a string such as `35xh100:prefill,5xh100:decode` into a cluster spec. Raises ConfigurationError."""
    # Pools are COUNTxMACHINE[@TP[xPP][epEP]][:ROLE][/BATCHER], with PP pipeline stages of TP accelerators each, and
    # experts spread over EP accelerators; the notation of plans, such as 4×h100@2×TP4, is read as well.
    require(bool(text.strip()), f"the cluster has no pools: {_POOL_SYNTAX}")
    known = catalog or load_catalog()
    return ClusterSpec(pools=tuple(_parse_pool(part.strip(), known) for part in text.split(",")), model=model)


def load_cluster(path: Path, *, catalog: Catalog | None = None) -> ClusterSpec:
    """Read a cluster file, or the cluster in a deployment file from `twofold plan`. Raises ConfigurationError."""
    return read_cluster(read_text("cluster", path), str(path), catalog=catalog)


def read_cluster(text: str, name: str, *, catalog: Catalog | None = None) -> ClusterSpec:
    """Parse a cluster file, as YAML or TOML by the suffix of `name`. Raises ConfigurationError."""
    suffix = Path(name).suffix.lower()
    require(suffix in _SUFFIXES, f"cluster {name} has an unknown suffix: use one of {', '.join(_SUFFIXES)}")
    raw = parse_toml("cluster", text, name) if suffix == ".toml" else _from_yaml(text, name)
    if isinstance(raw, dict) and isinstance(raw.get("cluster"), dict) and "deployment" in raw:
        raw = raw["cluster"]
    require(bool(raw), f"cluster {name} is empty: give at least a model and pools")
    try:
        # Not strict: YAML 1.1 reads 200e9 as a string.
        spec = msgspec.convert(raw, ClusterSpec, strict=False)
        known = catalog or load_catalog()
        return _checked(spec, with_profiles(spec, known))
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"cluster {name}: {_describe(error)}") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"cluster {name}: {error}") from error


def _parse_pool(text: str, catalog: Catalog) -> PoolSpec:
    found = _POOL.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"invalid pool {text!r}: {_POOL_SYNTAX}")
    role = "mixed" if found["role"] is None else found["role"].strip().lower()
    if role not in list(Role):
        raise ConfigurationError(f"pool {text!r}: {unknown_name('role', role, list(Role))}")
    parallel, stages, batcher = found["tensor_parallel"], found["pipeline_parallel"], found["batcher"]
    experts = found["expert_parallel"]
    pool = PoolSpec(
        machines=int(found["machines"]),
        machine=found["machine"],
        role=Role(role),
        tensor_parallel=None if parallel is None else int(parallel),
        pipeline_parallel=1 if stages is None else int(stages),
        expert_parallel=None if experts is None else int(experts),
        batcher=None if batcher is None else batcher.strip(),
    )
    try:
        return _checked_pool(pool, catalog)
    except ConfigurationError as error:
        raise ConfigurationError(f"pool {text!r}: {error}") from error


def _checked(spec: ClusterSpec, catalog: Catalog) -> ClusterSpec:
    """Validate a cluster, and replace machine aliases such as `h100` by catalog names. Raises ConfigurationError."""
    require(bool(spec.pools), "it has no pools")
    check_numbers(spec)
    pools = []
    for index, pool in enumerate(spec.pools):
        try:
            pools.append(_checked_pool(pool, catalog))
        except ConfigurationError as error:
            raise ConfigurationError(f"pools[{index}]: {error}") from error
    check_shared_nodes([(pool, catalog.machine(pool.machine)) for pool in pools])
    return msgspec.structs.replace(spec, pools=tuple(pools))


def _checked_pool(pool: PoolSpec, catalog: Catalog) -> PoolSpec:
    count = pool.machines
    require(count >= 1, f"machines must be at least 1, not {count}")
    require(count <= _MAX_MACHINES, f"machines must be at most {_MAX_MACHINES}, not {count}")
    machine = catalog.machine(pool.machine)
    layout_of(pool, machine)
    if pool.batcher is not None and pool.batcher not in BATCHERS:
        raise unknown_name("batcher", pool.batcher, BATCHERS)
    return msgspec.structs.replace(pool, machine=machine.name)


def _from_yaml(text: str, name: str) -> object:
    keys = _YAML_KEY.findall(text)
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:  # YAML would keep the last silently
        raise ConfigurationError(f"cluster {name} repeats the key {twice}")
    return parse_yaml("cluster", text, name)


def _describe(error: msgspec.ValidationError) -> str:
    """Return a message for users about an invalid field of a cluster file."""
    place, what = explain_validation(error)
    kinds = {"pools": PoolSpec, "failures": InstanceFailure, "kv_cache": CacheSpec, "control": ControlSpec}
    kind = next((kind for start, kind in kinds.items() if place.startswith(start)), ClusterSpec)
    _, _, field = what.partition("contains unknown field ")
    if field:
        what = f"unknown field {field}{suggestion(field, kind.__struct_fields__)}"
    elif what.startswith("invalid enum value"):
        known = _KNOWN.get(place, f"one of {', '.join(Role)}")
        what = f"{what.removeprefix('invalid enum value ')} is not {known}"
    return f"{place}: {what}" if place else what


_KNOWN: Final = {
    "max_num_batched_tokens": f"a number or {SATURATING}",
    "control.own_load": f"one of {', '.join(OwnLoad)}",
}
