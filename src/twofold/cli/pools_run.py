"""What `twofold pools` does: one HTTP call, and a table of the answer."""

import urllib.error
import urllib.request

import msgspec
from rich.console import Console
from rich.table import Table

from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.serving.controller.service import PoolMember

_TIMEOUT_S = 30


class Answer(msgspec.Struct, frozen=True):
    """Every worker, and what re-planning has decided lately."""

    pools: tuple[PoolMember, ...]
    replans: tuple[str, ...] = ()


def ask(url: str, api_key: str | None, *, instance: str | None = None, role: Role | None = None) -> Answer:
    """The pools of the service at `url`, after `instance` was given `role` if they are named."""
    if not url.startswith(("http://", "https://")):
        raise ConfigurationError(f"--url {url!r} is no URL: write it as in http://127.0.0.1:8000")
    body = None if instance is None else msgspec.json.encode({"instance": instance, "role": role})
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(f"{url.rstrip('/')}/pools", data=body, headers=headers)  # noqa: S310 (checked)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310 (checked)
            return msgspec.json.decode(response.read(), type=Answer)
    except urllib.error.HTTPError as error:
        raise ConfigurationError(_reason(error.read()) or f"{url} answered with {error.code}") from error
    except (OSError, msgspec.MsgspecError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigurationError(f"no service of Twofold answers at {url}: {reason}") from error


class _Error(msgspec.Struct, frozen=True):
    message: str = ""


class _Failure(msgspec.Struct, frozen=True):
    error: _Error = _Error()


def _reason(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_Failure).error.message
    except msgspec.MsgspecError:
        return ""


def show(answer: Answer) -> None:
    """A table, a line for each worker, and then a sentence for each decision of re-planning."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in (
        "worker",
        "role",
        "home",
        "state",
        "circuit breaker",
        "restarts",
        "waiting",
        "running",
        "KV",
    ):
        table.add_column(
            column, no_wrap=True, justify="right" if column in {"restarts", "waiting", "running"} else "left"
        )
    for one in answer.pools:
        table.add_row(
            one.instance,
            one.role.value,
            one.home.value,
            one.state,
            one.circuit_breaker,
            str(one.restarts),
            str(one.waiting),
            str(one.running),
            f"{1 - one.blocks_free / one.blocks_total:.0%}" if one.blocks_total else "",
        )
    console = Console()
    console.print(table)
    for said in answer.replans:
        console.print(f"re-planning, {said}", markup=False, highlight=False)
