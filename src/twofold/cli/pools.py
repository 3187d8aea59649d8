"""`twofold pools`: which worker of a running service plays which role, and changing it."""

from typing import Annotated

import typer

from twofold.instance import Role

app = typer.Typer(
    help="Show and set the roles of the workers of a running service.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Url = Annotated[str, typer.Option(help="Where the service listens.")]
Key = Annotated[str | None, typer.Option(envvar="TWOFOLD_API_KEY", help="The service's API key.")]


@app.callback()
def _group() -> None:
    """Show and set the roles of the workers of a running service."""


@app.command()
def show(url: Url = "http://127.0.0.1:8000", api_key: Key = None) -> None:
    """Show every worker: its role now, its home, whether it is up, what waits and runs on it."""
    from twofold.cli import pools_run  # noqa: PLC0415  (what it needs is not for the start of every command)

    pools_run.show(pools_run.ask(url, api_key))


@app.command(name="set")
def set_role(
    instance: Annotated[str, typer.Argument(metavar="WORKER", help="As in decode-0.")],
    role: Annotated[Role, typer.Argument(help="What it is to do from the next request on.")],
    url: Url = "http://127.0.0.1:8000",
    api_key: Key = None,
) -> None:
    """Let a worker play another role; nothing that runs is interrupted and no weights are loaded."""
    from twofold.cli import pools_run  # noqa: PLC0415  (as above)

    pools_run.show(pools_run.ask(url, api_key, instance=instance, role=role))
