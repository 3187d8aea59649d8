"""`twofold keygen`: a new cluster key."""

from pathlib import Path
from typing import Annotated

import typer


def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; it must not exist.")],
) -> None:
    """Make the secret that lets hosts join a service (see `twofold join`).

    Copy FILE to each of them by a way that nobody else can read: whoever has it may join.
    """
    from twofold.security.key import write_key  # noqa: PLC0415  (other commands do without)

    write_key(file)
    typer.echo(f"{file}: a new cluster key that only you can read", err=True)
