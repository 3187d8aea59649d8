"""From flags to a cluster: a file or a line of pools, what the flags override, and the failures to come."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from twofold.cluster.file import MAX_SECONDS, MIN_BYTES_PER_S, load_cluster, parse_cluster
from twofold.cluster.spec import SATURATING, CacheSpec, ClusterSpec, InstanceFailure
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog
from twofold.performance.host_profile import read_host_profile

_FAILURE = re.compile(r"(?P<instance>[^@]+)@(?P<at>[^+]+)(?:\+(?P<away>.+))?")


def read_spec(
    cluster: str | None,
    config: Path | None,
    catalog: Catalog,
    *,
    link_gb_per_s: float | None,
    failures: Sequence[str],
    **flags: str | float | bool | CacheSpec | None,
) -> ClusterSpec:
    """The cluster of `--cluster` or `--config`, changed by every flag that is not None.

    Raises ConfigurationError unless exactly one of the two is given, and for what neither of them can mean.
    """
    given: dict[str, object] = {name: value for name, value in flags.items() if value is not None}
    if link_gb_per_s is not None:
        given["link_bytes_per_s"] = _positive("--link-gb-per-s", link_gb_per_s) * 1e9
    if failures:
        given["failures"] = tuple(map(parse_failure, failures))
    if config is not None and cluster is None:
        return msgspec.structs.replace(load_cluster(config, catalog=catalog), **given)
    if cluster is None or config is not None:
        raise ConfigurationError(
            "give either --cluster, as in 35xh100:prefill,5xh100:decode, or --config FILE"
        )
    model = flags["model"]
    if not isinstance(model, str):
        raise ConfigurationError("--cluster says nothing of the model: give --model, as in bloom-176b")
    return msgspec.structs.replace(parse_cluster(cluster, model=model, catalog=catalog), **given)


def with_host(catalog: Catalog, model: str | None, profile: Path | None) -> tuple[Catalog, str | None]:
    """The catalog with the host of a profile in it, and its model where no other is asked for."""
    if profile is None:
        return catalog, model
    host = read_host_profile(profile)
    return host.extend(catalog), model or host.model.name


def parse_failure(text: str) -> InstanceFailure:
    """Read `INSTANCE@SECONDS` or `INSTANCE@SECONDS+SECONDS`; raises ConfigurationError on anything else."""
    found = _FAILURE.fullmatch(text.strip())
    at_s = _seconds(found["at"]) if found else None
    away_s = _seconds(found["away"]) if found and found["away"] is not None else None
    if found is None or at_s is None or (found["away"] is not None and not away_s):
        raise ConfigurationError(
            f"--fail {text} is not understood: write decode-0@30 for an end at 30 s, or decode-0@30+60"
        )
    return InstanceFailure(
        instance=found["instance"], at_s=at_s, back_s=None if away_s is None else at_s + away_s
    )


def parse_token_budget(text: str) -> int | str:
    """Read a number of tokens, or `saturating`; raises ConfigurationError on anything else."""
    if text == SATURATING:
        return text
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise ConfigurationError(
            f"--max-num-batched-tokens {text} is not understood: write a number, or {SATURATING}"
        )
    return int(text)


def _seconds(text: str) -> float | None:
    """A time that can be; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= MAX_SECONDS else None


def _positive(flag: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ConfigurationError(f"{flag} {value:g} cannot be: give more than 0")
    if value * 1e9 < MIN_BYTES_PER_S:
        raise ConfigurationError(f"{flag} {value:g} moves nothing: give at least {MIN_BYTES_PER_S / 1e9:g}")
    return value
