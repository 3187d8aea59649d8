"""`twofold pools`: show and set the roles of the workers of a running service."""

import urllib.error
import urllib.request
from contextlib import suppress
from typing import Final

import msgspec
from rich.console import Console

from twofold.cli.settings import Settings, command, flag, group
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.reporting.output import table
from twofold.serving.telemetry.snapshot import PoolMember

_TIMEOUT_S: Final = 30
_COLUMNS: Final = ("worker", "role", "home", "state", "circuit breaker", "restarts", "waiting", "running", "KV")


class PoolsSettings(Settings):
    """All flags of `twofold pools show`."""

    base_url: str = flag("URL of the service.", "http://127.0.0.1:8000", metavar="URL")
    api_key: str | None = flag("API key.", env="TWOFOLD_API_KEY", metavar="KEY")


class SetSettings(PoolsSettings):
    """All flags of `twofold pools set`."""

    instance: str = flag("Worker, as in decode-0.", ..., positional=True, metavar="WORKER")
    role: Role = flag("Its role from the next request on.", ..., positional=True)


class PoolsResponse(msgspec.Struct, frozen=True):
    """Response of the service's /pools: its workers, and the latest re-planning decisions."""

    pools: tuple[PoolMember, ...]
    replans: tuple[str, ...] = ()


@command
def show(settings: PoolsSettings) -> None:
    """Show every worker: its current role, its configured (home) role, its state and its load."""
    show_pools(ask(settings.base_url, settings.api_key))


@command
def set_role(settings: SetSettings) -> None:
    """Change the role of a worker without interrupting requests or loading weights again."""
    show_pools(ask(settings.base_url, settings.api_key, instance=settings.instance, role=settings.role))


def ask(url: str, api_key: str | None, *, instance: str | None = None, role: Role | None = None) -> PoolsResponse:
    """Return the workers of the service at `url`. With `instance`, first change the role of this instance to `role`."""
    if not url.startswith(("http://", "https://")):
        raise ConfigurationError(f"--base-url {url!r} is not a URL: write it as in http://127.0.0.1:8000")
    body = None if instance is None else msgspec.json.encode({"instance": instance, "role": role})
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(f"{url.rstrip('/')}/pools", data=body, headers=headers)  # noqa: S310 (checked)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310 (checked)
            return msgspec.json.decode(response.read(), type=PoolsResponse)
    except urllib.error.HTTPError as error:
        reason = f"{url} answered with {error.code}"
        with suppress(msgspec.MsgspecError, KeyError, TypeError):
            reason = str(msgspec.json.decode(error.read())["error"]["message"])
        raise ConfigurationError(reason) from error
    except (OSError, msgspec.MsgspecError) as error:
        cause = getattr(error, "reason", None) or error
        raise ConfigurationError(f"no service of Twofold answers at {url}: {cause}") from error


def show_pools(response: PoolsResponse) -> None:
    """Print a row for each worker, and a line for each re-planning decision."""
    console = Console()
    drawn = table(None, _COLUMNS, range(5, 9), map(_row, response.pools))
    drawn.box, drawn.pad_edge = None, False  # nine columns in a terminal's width
    for column in drawn.columns:
        column.no_wrap = True
    console.print(drawn)
    for decision in response.replans:
        console.print(f"re-planning, {decision}", markup=False, highlight=False)


def _row(it: PoolMember) -> tuple[str, ...]:
    used = f"{1 - it.blocks_free / it.blocks_total:.0%}" if it.blocks_total else ""
    numbers = map(str, (it.restarts, it.waiting, it.running))
    return (it.instance, it.role, it.home, it.state, it.circuit_breaker, *numbers, used)


app = group("Show and set the roles of the workers of a running service.", {"show": show, "set": set_role})
