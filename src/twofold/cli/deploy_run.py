"""What `twofold deploy` does once its flags are read."""

import re
from pathlib import Path

import typer

from twofold.cluster.file import load_cluster
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import load_catalog
from twofold.kubernetes.from_plan import values_from
from twofold.kubernetes.manifests import as_yaml, documents, merged, read_values, values_of
from twofold.kubernetes.objects import check, objects_of
from twofold.kubernetes.values import Json
from twofold.serving.launch.worker_plan import check_servable

_FILES = {"k8s": "manifests.yaml", "helm": "values.yaml"}
# A label of DNS that leaves room for what is put behind it, here and by Kubernetes.
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")


def run(plan: Path, form: str, files: list[Path], *, name: str, catalog: list[Path], output: str) -> None:
    """Write the manifests or values; raises ConfigurationError."""
    if form not in _FILES:
        raise ConfigurationError(f"--format {form!r} is unknown: choose one of {', '.join(_FILES)}")
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"--name {name!r} is no name: write up to 40 small letters, digits and dashes, a letter first"
        )
    given: Json = {}
    for file in files:
        given = merged(given, read_values(file))
    values = merged(_planned(plan, catalog, emulated=given.get("engine") == "emulated"), given)
    checked = values_of(values)
    check(checked)
    text = documents(objects_of(name, checked)) if form == "k8s" else as_yaml(values)
    _write(text, output, _FILES[form])


def _planned(plan: Path, files: list[Path], *, emulated: bool) -> Json:
    catalog = load_catalog(files)
    spec = load_cluster(plan, catalog=catalog)
    try:
        check_servable(spec)
        return values_from(spec, catalog, plan.read_text(encoding="utf-8"), emulated=emulated)
    except ConfigurationError as error:
        raise ConfigurationError(f"{plan}: {error}") from error


def _write(text: str, output: str, name: str) -> None:
    if output == "-":
        typer.echo(text, nl=False)
        return
    path = Path(output)
    path = path / name if path.is_dir() else path
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--output {path} cannot be written: {error.strerror}") from error
    typer.echo(str(path), err=True)
