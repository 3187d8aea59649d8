"""Values as they are given, one over the other, and objects as YAML."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import yaml

from twofold.errors import ConfigurationError
from twofold.hardware.suggestions import explain_validation
from twofold.kubernetes.values import Json, Values

_WIDTH = 120


def merged(below: Json, above: Json) -> Json:
    """Both, as helm merges values: mappings key by key, everything else as it is `above`."""
    made = dict(below)
    for key, value in above.items():
        under = made.get(key)
        made[key] = merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return made


def read_values(path: Path) -> Json:
    """The values of a file (YAML); raises ConfigurationError."""
    try:
        found = msgspec.yaml.decode(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"--values {path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigurationError(f"--values {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"--values {path} has no values in it: write them as in `serve: {{slo: …}}`")
    return found


def values_of(given: Json) -> Values:
    """All values, with the chart's defaults; raises ConfigurationError with the place of what is wrong."""
    try:
        return msgspec.convert(merged(msgspec.to_builtins(Values()), given), Values)
    except msgspec.ValidationError as error:
        place, what = explain_validation(error)
        raise ConfigurationError(f"values: {place + ': ' if place else ''}{what}") from error


def documents(objects: Iterable[Json]) -> str:
    """YAML, a document for each object, as `kubectl apply -f` takes it."""
    return "".join(f"---\n{as_yaml(each)}" for each in objects)


def as_yaml(value: Json) -> str:
    """YAML, with texts of several lines as they are."""
    return str(
        yaml.dump(
            msgspec.to_builtins(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_WIDTH
        )
    )


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Writes texts of several lines as blocks, and repeats what occurs twice instead of pointing to it."""

    def ignore_aliases(self, _: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
