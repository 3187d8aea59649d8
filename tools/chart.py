"""Generate the Helm chart's values.yaml, values.schema.json and README table: `python tools/chart.py DIR`."""

import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from twofold.cli.serve.join import JoinSettings
from twofold.cli.serve.settings import ServeSettings
from twofold.cli.settings import Settings, flag_name, flags_of, help_text
from twofold.kubernetes.values import ServeValues, Values

_WIDTH = 110
_TABLE = re.compile(r"(?<=<!-- values -->\n).*(?=<!-- end of values -->)", re.DOTALL)
_ROLE = re.compile(r"^workers\.(prefill|decode|mixed)\.")
_ANYTHING = {"type": ["object", "array", "string", "number", "boolean", "null"]}

Json = dict[str, object]


class _Property(msgspec.Struct, frozen=True):
    """JSON schema of one value of the Helm chart, or of one group of values."""

    description: str
    default: object = None
    ref: str | None = msgspec.field(default=None, name="$ref")


class _Group(msgspec.Struct, frozen=True):
    properties: dict[str, _Property]


def schema() -> Json:
    """Return the JSON schema of the chart's values, for `values.schema.json`."""
    made = msgspec.json.schema(Values, schema_hook=lambda _: _ANYTHING)
    texts = _descriptions()
    for name, group in made["$defs"].items():
        known = texts["PodValues"] | texts[name]
        group["properties"] = {key: {"description": known[key], **value} for key, value in group["properties"].items()}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **made}


def values_yaml() -> str:
    """Return the text of `values.yaml`: all values with their defaults, and their descriptions as comments."""
    head = "# Generated from src/twofold/kubernetes/values.py: edit the values there, then run `make chart`."
    return "\n".join([head, "", *_lines("Values", msgspec.to_builtins(Values()), 0)]) + "\n"


def table() -> str:
    """Return the Markdown table of the chart's values and their defaults."""
    rows: dict[str, str] = {}
    for path, each, default in _leaves("Values", msgspec.to_builtins(Values()), ""):
        name = _ROLE.sub("workers.ROLE.", path)  # the values of all roles share rows
        rows.setdefault(name, f"| `{name}` | `{_json(default)}` | {each.description} |")
    return "\n".join(["| value | default | |", "| --- | --- | --- |", *rows.values()]) + "\n"


def with_table(readme: str) -> str:
    """Return the README text `readme` with an updated table of the Helm chart's values."""
    return _TABLE.sub(lambda _: table(), readme)


def write(chart: Path) -> None:
    """Generate `values.yaml`, `values.schema.json` and the table in `README.md` in the directory of the Helm chart."""
    (chart / "values.yaml").write_text(values_yaml(), encoding="utf-8")
    text = msgspec.json.format(msgspec.json.encode(schema()), indent=2) + b"\n"
    (chart / "values.schema.json").write_bytes(text)
    readme = chart / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8")), encoding="utf-8")


def _descriptions() -> dict[str, dict[str, str]]:
    """Return the description of every Helm value, by group."""
    texts = msgspec.convert(
        tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")), dict[str, dict[str, str]]
    )
    join = {flag_name(name): _flag_description(JoinSettings, name) for name in flags_of(JoinSettings)}
    serve = [each for each in msgspec.structs.fields(ServeValues) if each.name in flags_of(ServeSettings)]
    texts["ServeValues"] |= {each.encode_name: _flag_description(ServeSettings, each.name) for each in serve}
    return {group: {key: join.get(text, text) for key, text in each.items()} for group, each in texts.items()}


def _flag_description(settings: type[Settings], name: str) -> str:
    return f"`{flag_name(name)}`: {help_text(settings, name)}"


def _group(name: str) -> dict[str, _Property]:
    definitions = msgspec.convert(schema()["$defs"], dict[str, _Group])
    return definitions[name].properties


def _below(each: _Property, default: object) -> tuple[str, Json] | None:
    """Return the name and the defaults of a nested group of Helm values; None for a single value."""
    if each.ref is None or not isinstance(default, dict):
        return None
    return each.ref.rpartition("/")[2], default


def _lines(group: str, defaults: Json, depth: int) -> Iterator[str]:
    pad = "  " * depth
    for name, each in _group(group).items():
        yield from (f"{pad}# {line}" for line in textwrap.wrap(each.description, _WIDTH - len(pad)))
        below = _below(each, defaults[name])
        if below is None:
            yield f"{pad}{name}: {_json(defaults[name])}"
        else:
            yield f"{pad}{name}:"
            yield from _lines(*below, depth + 1)
        if not depth:
            yield ""


def _leaves(group: str, defaults: Json, path: str) -> Iterator[tuple[str, _Property, object]]:
    for name, each in _group(group).items():
        below = _below(each, defaults[name])
        if below is None:
            yield f"{path}{name}", each, defaults[name]
        else:
            yield from _leaves(*below, f"{path}{name}.")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
