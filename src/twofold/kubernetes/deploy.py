"""`twofold deploy`: convert a plan to Kubernetes objects or to values for the Helm chart."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import typer
import yaml

from twofold.atomic_file import AtomicFile
from twofold.cli.options import CATALOG
from twofold.cli.settings import Settings, command, flag
from twofold.cluster.file import load_cluster
from twofold.cluster.profiles import InstanceProfile, instance_profiles
from twofold.cluster.spec import SATURATING, ClusterSpec
from twofold.errors import ConfigurationError
from twofold.hardware.catalog import Catalog, load_catalog
from twofold.hardware.suggestions import explain_validation, read_yaml
from twofold.instance import Role
from twofold.kubernetes.objects import check, objects_of
from twofold.kubernetes.values import Json, Values
from twofold.performance.profile import HOST
from twofold.serving.launch.worker_plan import check_servable

FORMATS: Final = {"k8s": "Manifests for `kubectl apply`.", "helm": "Values for the chart in deploy/helm/twofold."}
MACHINE_LABEL: Final = "twofold/machine"
GPU: Final = "nvidia.com/gpu"
_FILES: Final = {"k8s": "manifests.yaml", "helm": "values.yaml"}
# A DNS label that leaves room for the suffixes of object names.
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_WIDTH: Final = 120


class DeploySettings(Settings):
    """All flags of `twofold deploy`."""

    plan: Path = flag(
        "Deployment written by `twofold plan --output`, or any cluster file.", ..., positional=True, metavar="PLAN"
    )
    format: str = flag("Output format.", "k8s", choices=FORMATS)
    values: tuple[Path, ...] = flag(
        "Values file that overrides the plan, as `helm --values` takes it; repeatable.", (), metavar="FILE"
    )
    name: str = flag("Name of the release, and prefix of object names.", "twofold")
    catalog: tuple[Path, ...] = CATALOG.field(())
    output: str = flag("File or directory to write; - prints.", "-", metavar="FILE")


@command
def deploy(settings: DeploySettings) -> None:
    """Write the Kubernetes objects that serve a plan: a gateway, and a worker for each instance.

    Nothing is sent to a cluster. Create the Secrets with the cluster key and the API keys yourself.
    """
    if not _NAME.fullmatch(settings.name):
        raise ConfigurationError(
            f"--name {settings.name!r} is not valid: use up to 40 lower-case letters, digits and dashes, a letter first"
        )
    given: Json = {}
    for file in settings.values:
        given = merged(given, read_values(file))
    emulated = given.get("engine") == "emulated"
    values = merged(_planned(settings.plan, settings.catalog, emulated=emulated), given)
    checked = values_of(values)
    check(checked)
    text = documents(objects_of(settings.name, checked)) if settings.format == "k8s" else as_yaml(values)
    _write(text, settings.output, _FILES[settings.format])


def _planned(plan: Path, files: Sequence[Path], *, emulated: bool) -> Json:
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
    AtomicFile(path).save(text)
    typer.echo(str(path), err=True)


def values_from(spec: ClusterSpec, catalog: Catalog, text: str, *, emulated: bool) -> Json:
    """Return the Helm values of a cluster. Raises ConfigurationError for a pool that the chart does not support."""
    if emulated:
        return {"engine": "emulated", "plan": text}
    # Each instance is a pod with one worker on one accelerator, on a node labelled with its machine's name.
    profiles = instance_profiles(spec, catalog)
    workers: Json = {role.value: {"replicas": 0} for role in Role}
    for index, profile in enumerate(profiles):
        mistake = _mistake(profile, profiles[:index])
        if mistake is not None:
            raise ConfigurationError(f"pools[{index}]: {mistake}")
        workers[profile.pool.role.value] = _workers(profile, catalog.model(spec.model).kv_bytes_per_token)
    return {"plan": text, "serve": _serve(spec, profiles), "workers": workers}


def _mistake(profile: InstanceProfile, before: Sequence[InstanceProfile]) -> str | None:
    """Return the reason why a pool cannot be deployed on Kubernetes, or None."""
    accelerators = profile.tensor_parallel * profile.pool.pipeline_parallel
    if accelerators > 1:
        return (
            f"its instances have {accelerators} accelerators, and workers that join have one: plan with --tp 1, or "
            "deploy it emulated (engine: emulated)"
        )
    role = profile.pool.role
    if any(role is other.pool.role for other in before):
        return f"it is the second pool of {role.value}, and all pods of a role are alike"
    return None


def _serve(spec: ClusterSpec, profiles: Sequence[InstanceProfile]) -> Json:
    budget = "auto" if spec.max_num_batched_tokens == SATURATING else spec.max_num_batched_tokens
    serve: Json = {
        "router": spec.router,
        "batcher": ",".join(f"{profile.pool.role.value}={profile.batcher}" for profile in profiles),
        "handoff": spec.handoff,
        "blockSize": spec.block_size,
        "maxNumSeqs": spec.max_num_seqs,
        "maxNumBatchedTokens": budget,
    }
    return serve if spec.swap_space_bytes is None else serve | {"swapSpace": spec.swap_space_bytes}


def _workers(profile: InstanceProfile, kv_bytes_per_token: int) -> Json:
    values: Json = {
        "replicas": profile.layout.instances,
        "kvCacheMemory": str(profile.capacity_tokens * kv_bytes_per_token),
    }
    if profile.machine.name != HOST:  # the machine of a profile is any CPU
        values |= {
            "device": "cuda",
            "resources": {"limits": {GPU: 1}},
            "nodeSelector": {MACHINE_LABEL: profile.machine.name},
        }
    return values


def merged(below: Json, above: Json) -> Json:
    """Merge Helm values as helm does; the values in `above` take precedence."""
    made = dict(below)
    for key, value in above.items():
        under = made.get(key)
        made[key] = merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return made


def read_values(path: Path) -> Json:
    """Read a YAML file of Helm values. Raises ConfigurationError if the file is unreadable or is not a mapping."""
    found = read_yaml("--values", path)
    if not isinstance(found, dict):
        raise ConfigurationError(f"--values {path} is not a mapping: write values as in `serve: {{slo: …}}`")
    return found


def values_of(given: Json) -> Values:
    """Validate Helm values and add defaults. Raises ConfigurationError that names the path of an invalid value."""
    try:
        return msgspec.convert(merged(msgspec.to_builtins(Values()), given), Values)
    except msgspec.ValidationError as error:
        place, what = explain_validation(error)
        raise ConfigurationError(f"values: {place + ': ' if place else ''}{what}") from error


def documents(objects: Iterable[Json]) -> str:
    """Format Kubernetes objects as YAML documents for `kubectl apply -f`."""
    return "".join(f"---\n{as_yaml(each)}" for each in objects)


def as_yaml(value: Json) -> str:
    """Format a value as YAML, with multi-line texts as block scalars."""
    return str(yaml.dump(msgspec.to_builtins(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH))


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """YAML dumper that writes multi-line text as block scalars and never writes anchors."""

    def ignore_aliases(self, _: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
