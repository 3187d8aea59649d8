"""Kubernetes objects of a deployment, rendered from data/objects.yaml.jinja."""

import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from importlib.resources import files

import msgspec
import yaml
from jinja2 import Environment, StrictUndefined

from twofold import __version__
from twofold.errors import ConfigurationError, require
from twofold.instance import Role
from twofold.kubernetes.values import Json, Values
from twofold.scheduling.routers import FIXED_ROLE_ROUTERS, LIVE_ROUTERS

_DATA = files(__package__) / "data"


def check(values: Values) -> None:
    """Raise ConfigurationError if a deployment with these values could not serve requests."""
    if values.engine == "emulated":
        require(bool(values.plan), "engine emulated needs plan, with the machines to emulate")
        return
    roles = _roles(values)
    require(bool(roles), "workers: all replicas are 0")
    router = values.serve.router or "jsq"
    moving = [name for name in LIVE_ROUTERS if name not in FIXED_ROLE_ROUTERS]
    if Role.MIXED in roles and len(roles) > 1 and router not in moving:
        raise ConfigurationError(f"workers.mixed beside others is for serve.router {' or '.join(moving)}, not {router}")


def objects_of(name: str, values: Values) -> list[Json]:
    """Return all Kubernetes objects of the release `name`. Raises ConfigurationError for invalid values."""
    check(values)
    # JSON is YAML, so a value of any type fits in a line of the template.
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701  (no HTML)
    environment.filters["json"] = lambda value: msgspec.json.encode(value).decode()
    template = environment.from_string((_DATA / "objects.yaml.jinja").read_text(encoding="utf-8"))
    given = msgspec.to_builtins(values)
    text = template.render(
        release=name,
        version=__version__,
        values=given,
        names={"app.kubernetes.io/name": "twofold", "app.kubernetes.io/instance": name},
        workers={role: given["workers"][role] for role in _roles(values)},
        serve_flags=list(_flags(given["serve"])),
        plan_checksum=sha256(values.plan.encode()).hexdigest(),
        dashboard=(_DATA / "grafana.json").read_text(encoding="utf-8"),
    )
    return list(yaml.safe_load_all(text))


def _roles(values: Values) -> list[Role]:
    """Return the roles that have pods of their own."""
    return [] if values.engine == "emulated" else [role for role in Role if getattr(values.workers, role).replicas]


def _flags(serve: Mapping[str, object]) -> Iterator[str]:
    """Convert Helm values to flags of `twofold serve`, in the same order as the Helm chart."""
    for key, value in sorted(serve.items()):
        flag = re.sub(r"(?=[A-Z])", "-", key).lower()
        if isinstance(value, bool):
            yield f"--{'' if value else 'no-'}{flag}"
        elif value is not None and key != "extraArgs":
            yield f"--{flag}={value if isinstance(value, str) else msgspec.json.encode(value).decode()}"
    yield from msgspec.convert(serve["extraArgs"], list[str])
