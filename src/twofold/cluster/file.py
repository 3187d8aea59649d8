"""Clusters as people write them: a file (YAML or TOML), or a line such as `35xh100:prefill,5xh100:decode`.

Names of machines become those of the catalog, so that `h100` and `dgx-h100` are one and the same afterwards.
"""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from twofold.cluster.layout import check_shared_nodes, layout_of
from twofold.cluster.spec import SATURATING, CacheSpec, ClusterSpec, ControlSpec, InstanceFailure, PoolSpec
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog, load_catalog
from twofold.hardware.suggestions import explain_validation, suggestion, unknown_name
from twofold.instance import Role
from twofold.performance.host_profile import read_host_profile
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.cluster.shared import OwnLoad

_POOL = re.compile(
    r"(?P<machines>\d{1,9})x(?P<machine>[^@:/\s]+)"
    r"(?:@(?P<tensor_parallel>\d{1,4})(?:x(?P<pipeline_parallel>\d{1,4}))?)?"
    r"(?::(?P<role>[^/]*)(?:/(?P<batcher>.*))?)?"
)
_LINE: Final = (
    "write pools as in 35xh100:prefill,5xh100:decode, or 4xh100@4:mixed/chunked-prefill, or 4xa100@2x4"
)
_MOST_MACHINES: Final = 1_000_000  # more is a slip of the keyboard, which would fill memory with instances
# Longer, and slower, is a slip of the keyboard as well; a float cannot hold picoseconds of it either.
MAX_SECONDS: Final = 1e9
MIN_BYTES_PER_S: Final = 1.0
_YAML_PLACE = re.compile(r"line (\d+), column (\d+)")
_YAML_KEY = re.compile(r"^([A-Za-z_]+)[ \t]*:", re.MULTILINE)


def parse_cluster(text: str, *, model: str, catalog: Catalog | None = None) -> ClusterSpec:
    """The cluster of a line, with every setting but its pools and its model as `ClusterSpec` has it.

    A pool is COUNTxMACHINE, then `@TP` or `@TPxPP` for instances of PP stages (1 if not given) of TP accelerators each,
    `:ROLE` (mixed if not given) and `/BATCHER`.
    `catalog` is that of the package and the environment if None. Raises ConfigurationError.
    """
    return ClusterSpec(pools=parse_pools(text, catalog=catalog), model=model)


def parse_pools(text: str, *, catalog: Catalog | None = None) -> tuple[PoolSpec, ...]:
    """The pools of a line; see `parse_cluster`."""
    if not text.strip():
        raise ConfigurationError(f"a cluster without pools serves nobody: {_LINE}")
    known = catalog or load_catalog()
    return tuple(_parse_pool(part.strip(), known) for part in text.split(","))


def load_cluster(path: Path, *, catalog: Catalog | None = None) -> ClusterSpec:
    """The cluster of a file, YAML or TOML by its ending, with the fields of `ClusterSpec`; see `parse_cluster`.

    A deployment file, as `twofold plan --output` writes it, stands for the cluster in it.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigurationError(f"cluster {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"cluster {path} is not a text file in UTF-8") from error
    return read_cluster(text, str(path), catalog=catalog)


def read_cluster(text: str, name: str, *, catalog: Catalog | None = None) -> ClusterSpec:
    """The cluster of a file with this content, and this name, whose ending says what it is written in."""
    reader = _READERS.get(Path(name).suffix.lower())
    if reader is None:
        raise ConfigurationError(
            f"cluster {name} is of no known kind: its name must end in {', '.join(_READERS)}"
        )
    raw = reader(text, name)
    if isinstance(raw, dict) and isinstance(raw.get("cluster"), dict) and "deployment" in raw:
        raw = raw["cluster"]  # a file of `twofold plan --output` holds a cluster file
    if not raw:
        raise ConfigurationError(f"cluster {name} is empty: it needs at least a model and pools")
    try:
        # Not strict, because YAML 1.1 takes 200e9 for a text.
        spec = msgspec.convert(raw, ClusterSpec, strict=False)
        known = catalog or load_catalog()
        return _checked(
            spec, known if spec.profile is None else read_host_profile(spec.profile).extend(known)
        )
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"cluster {name}: {_what_is_wrong(error)}") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"cluster {name}: {error}") from error


def dump_cluster(spec: ClusterSpec) -> str:
    """The cluster as a YAML file that `load_cluster` reads back; every setting is in it, but none that is not set."""
    fields = msgspec.to_builtins(spec)
    for group in (fields, *fields["pools"], *fields["failures"]):
        for key in [key for key, value in group.items() if value is None or value == ()]:
            del group[key]
    return msgspec.yaml.encode(fields).decode()


def _parse_pool(text: str, catalog: Catalog) -> PoolSpec:
    found = _POOL.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"pool {text!r} is not understood: {_LINE}")
    role = "mixed" if found["role"] is None else found["role"].strip().lower()
    if role not in list(Role):
        raise ConfigurationError(f"pool {text!r}: {unknown_name('role', role, list(Role))}")
    parallel, stages, batcher = found["tensor_parallel"], found["pipeline_parallel"], found["batcher"]
    pool = PoolSpec(
        machines=int(found["machines"]),
        machine=found["machine"],
        role=Role(role),
        tensor_parallel=None if parallel is None else int(parallel),
        pipeline_parallel=1 if stages is None else int(stages),
        batcher=None if batcher is None else batcher.strip(),
    )
    try:
        return _checked_pool(pool, catalog)
    except ConfigurationError as error:
        raise ConfigurationError(f"pool {text!r}: {error}") from error


def _checked(spec: ClusterSpec, catalog: Catalog) -> ClusterSpec:
    """The cluster, if its numbers can be, with its machines called as the catalog does."""
    if not spec.pools:
        raise ConfigurationError("it has no pools: a cluster without pools serves nobody")
    for field in (
        "max_num_batched_tokens",
        "pipeline_chunk",
        "inline_tbt_s",
        "max_num_seqs",
        "block_size",
        "kv_bytes_per_token",
        "kv_capacity_tokens",
        "link_bytes_per_s",
        "swap_space_bytes",
        "swap_bytes_per_s",
    ):
        value = getattr(spec, field)
        given = value is not None and value != SATURATING
        _require(not given or 0 < value < float("inf"), f"{field} must be more than 0, not {value}")
    latency, share = spec.link_latency_s, spec.memory_utilization
    _require(
        latency is None or 0 <= latency <= MAX_SECONDS,
        f"link_latency_s cannot be {latency}: it is in seconds",
    )
    for field in ("link_bytes_per_s", "swap_bytes_per_s"):
        speed = getattr(spec, field)
        _require(
            speed is None or speed >= MIN_BYTES_PER_S,
            f"{field} {speed} moves nothing: give at least {MIN_BYTES_PER_S:g}",
        )
    _require(0 < share <= 1, f"memory_utilization {share} is no share: give more than 0, at most 1")
    for index, failure in enumerate(spec.failures):
        _check_failure(failure, f"failures[{index}]")
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
    _require(count >= 1, f"it has {count} machines: give a count of at least 1")
    _require(count <= _MOST_MACHINES, f"it has {count} machines, more than {_MOST_MACHINES}")
    machine = catalog.machine(pool.machine)
    layout_of(pool, machine)
    if pool.batcher is not None and pool.batcher not in BATCHERS:
        raise unknown_name("batcher", pool.batcher, BATCHERS)
    return msgspec.structs.replace(pool, machine=machine.name)


def _check_failure(failure: InstanceFailure, where: str) -> None:
    at_s, back_s = failure.at_s, failure.back_s
    _require(0 <= at_s <= MAX_SECONDS, f"{where}: at_s cannot be {at_s}: it is in seconds from the start")
    later = back_s is None or at_s < back_s <= MAX_SECONDS
    _require(later, f"{where}: back_s must be later than at_s, which is {at_s}, not {back_s}")


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise ConfigurationError(sentence)


def _from_yaml(text: str, name: str) -> object:
    keys = _YAML_KEY.findall(text)
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:  # YAML would take the last and forget the others
        raise ConfigurationError(f"cluster {name} says {twice} more than once")
    try:
        return msgspec.yaml.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        places = _YAML_PLACE.findall(str(error))
        reason = [line for line in lines if not line.startswith("in ")] or ["it is nested too deeply"]
        where = f" (line {places[-1][0]}, column {places[-1][1]})" if places else ""
        raise ConfigurationError(f"cluster {name} is not YAML: {reason[-1]}{where}") from error


def _from_toml(text: str, name: str) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"cluster {name} is not TOML: {error}") from error


def _what_is_wrong(error: msgspec.ValidationError) -> str:
    """The place and the reason, with the field that may be meant where one is not known."""
    place, what = explain_validation(error)
    kinds = {"pools": PoolSpec, "failures": InstanceFailure, "kv_cache": CacheSpec, "control": ControlSpec}
    kind = next((kind for start, kind in kinds.items() if place.startswith(start)), ClusterSpec)
    _, _, field = what.partition("contains unknown field ")
    if field:
        what = f"there is no field {field}{suggestion(field, kind.__struct_fields__)}"
    elif what.startswith("invalid enum value"):
        known = _KNOWN.get(place, f"one of {', '.join(Role)}")
        what = f"{what.removeprefix('invalid enum value ')} is not {known}"
    return f"{place}: {what}" if place else what


_KNOWN: Final = {
    "max_num_batched_tokens": f"a number or {SATURATING}",
    "control.own_load": f"one of {', '.join(OwnLoad)}",
}
_READERS: Final[dict[str, Callable[[str, str], object]]] = {
    ".yaml": _from_yaml,
    ".yml": _from_yaml,
    ".json": _from_yaml,  # YAML holds all of JSON
    ".toml": _from_toml,
}
