"""`twofold deploy`: a plan as objects of Kubernetes, or as values for the Helm chart."""

from pathlib import Path
from typing import Annotated

import typer

_PLAN = "What `twofold plan --output` wrote, or any cluster file."
_FORMAT = "k8s: manifests for `kubectl apply`; helm: values for the chart in deploy/helm/twofold."
_VALUES = "A file of values over what the plan says, as `helm --values` takes it; may be given several times."
_NAME = "Name of the release: that of all objects, or how theirs begin."
_OUTPUT = "Write here (a file, or a directory for a file of its name); - prints."


def deploy(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help=_PLAN, show_default=False)],
    form: Annotated[str, typer.Option("--format", help=_FORMAT)] = "k8s",
    values: Annotated[list[Path] | None, typer.Option(help=_VALUES)] = None,
    name: Annotated[str, typer.Option(help=_NAME)] = "twofold",
    catalog: Annotated[
        list[Path] | None, typer.Option(help="A file with more machines or models (TOML).")
    ] = None,
    output: Annotated[str, typer.Option(help=_OUTPUT)] = "-",
) -> None:
    """Write what runs a plan on Kubernetes: a gateway, and a worker for each of its instances.

    Nothing is sent anywhere. The Secrets with the cluster key and the API keys are for you to make.
    """
    from twofold.cli import deploy_run  # noqa: PLC0415  (what it needs is too heavy for the start of every command)

    deploy_run.run(plan, form, values or [], name=name, catalog=catalog or [], output=output)
