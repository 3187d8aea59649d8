"""Error messages for users: unknown names, invalid values and unreadable files."""

import difflib
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from twofold.errors import ConfigurationError

_PLACE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<place>.*)`)?", re.DOTALL)
_YAML_PLACE = re.compile(r"line (\d+), column (\d+)")


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a hint such as ` (did you mean h100?)`, or an empty string if no known name is similar."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[found[0]]}?)" if found else ""


def unknown_name(kind: str, name: str, known: Iterable[str], *, also: Iterable[str] = ()) -> ConfigurationError:
    """Create the error for an unknown name, with the known names and a suggestion."""
    names = sorted(known)
    hint = suggestion(name, (*names, *also))
    return ConfigurationError(f"unknown {kind} {name!r}{hint}; choose from {', '.join(names)}")


def explain_validation(error: msgspec.ValidationError, mapping: str = "table") -> tuple[str, str]:
    """Return the location of the invalid value in a msgspec error, and a readable reason.

    The reason calls a mapping by its name in the format of the file: `table` in TOML, `object` in JSON.
    """
    found = _PLACE.fullmatch(str(error))
    # The place is empty if the whole value is wrong.
    place, what = (found["place"] or "", found["what"]) if found else ("", str(error))
    what = what.replace("`", "").replace(" | ", " or ").replace("Object ", "").replace("object", mapping)
    return place, what[:1].lower() + what[1:]


def read_text(kind: str, path: Path) -> str:
    """Read a text file. Raises ConfigurationError if it is unreadable."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise ConfigurationError(f"{kind} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{kind} {path} is not a text file in UTF-8") from error


def read_yaml(kind: str, path: Path) -> Any:  # noqa: ANN401
    """Read a YAML file. Raises ConfigurationError if it is invalid."""
    return parse_yaml(kind, read_text(kind, path), str(path))


def parse_yaml(kind: str, text: str, name: str) -> Any:  # noqa: ANN401
    """Parse the content of a YAML file. Raises ConfigurationError if it is invalid."""
    try:
        return msgspec.yaml.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        places = _YAML_PLACE.findall(str(error))
        reason = [line for line in lines if not line.startswith("in ")] or ["nested too deeply"]
        where = f" (line {places[-1][0]}, column {places[-1][1]})" if places else ""
        raise ConfigurationError(f"{kind} {name} is not YAML: {reason[-1]}{where}") from error


def parse_toml(kind: str, text: str, name: str) -> dict[str, Any]:
    """Parse the content of a TOML file. Raises ConfigurationError if it is invalid."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{kind} {name} is not TOML: {error}") from error
