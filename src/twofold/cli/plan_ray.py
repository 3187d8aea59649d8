"""`twofold plan --ray`: the machines of a live Ray cluster, in place of flags that say which there are."""

import typer

from twofold.errors import ConfigurationError
from twofold.planning.executors.ray import ray_inventory
from twofold.planning.problem import Problem
from twofold.raycluster.cluster import connect, list_nodes


def machines_of(problem: Problem, address: str, *, goodput: bool) -> dict[str, int]:
    """How many machines of each kind there are, or accelerators of each for goodput; nothing where there are none.

    Raises ConfigurationError where there is no cluster, or nothing that makes up a machine of the catalog.
    """
    stock = ray_inventory(list_nodes(connect(address, "--ray")), problem.catalog)
    for reason in stock.left_out:
        typer.echo(f"note: left out: {reason}", err=True)
    found = stock.accelerators if goodput else stock.machines
    if stock.accelerators and not found:
        raise ConfigurationError(
            f"no node of the Ray cluster at {address} has all accelerators of a machine of the catalog: plan with "
            "--objective goodput, which counts accelerators, or name --machines"
        )
    if found:
        typer.echo(f"note: planned for the Ray cluster at {address}: {stock_text(found)}", err=True)
    return found


def stock_text(stock: dict[str, int]) -> str:
    """As flags write it."""
    return ",".join(f"{name}={count}" for name, count in stock.items())
