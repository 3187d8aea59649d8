"""Pages of the site generated from the code: commands, policies, Python, HTTP requests, catalog, support matrix,
notebooks.

mkdocs calls `on_files` while it builds the site (`make docs`).
"""

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import support_matrix
from twofold import api
from twofold.cli.main import COMMANDS, load
from twofold.cli.settings import summary
from twofold.engine.registry import ENGINES
from twofold.hardware.catalog import load_catalog
from twofold.kvcache.eviction import EVICTIONS
from twofold.performance.registry import PERFORMANCE_MODELS
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.routers import ROUTERS
from twofold.serving.gateway.openapi import openapi
from twofold.transport.registry import TRANSPORTS


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the files of the site."""
    pages = {
        "commands": commands(),
        "policies": policies(),
        "python": python(),
        "http": requests(),
        "catalog": catalog(),
        "support": support_matrix.Page(support_matrix.collect()).text(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for path in sorted(Path(config.docs_dir).rglob("*.ipynb")):
        page = path.relative_to(config.docs_dir).with_suffix(".md")
        files.append(File.generated(config, page.as_posix(), content=notebook(path)))
    return files


def notebook(path: Path) -> str:
    """Return a notebook without its outputs as a page."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    parts = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in texts]
    return "\n\n".join([parts[0], f"[Download the notebook]({path.name})", *parts[1:]])


def commands() -> str:
    """Return a page with every command and its flags."""
    text = ["# Commands", "Each flag of a command is also a key of its `--config` file (YAML): `max-num-seqs: 64`."]
    for name in COMMANDS:
        text += _command(f"twofold {name}", load(name))
    return "\n\n".join(text)


def _command(name: str, command: Any) -> list[str]:  # noqa: ANN401  (Typer's commands have no public type)
    text = [f"## {name}", inspect.cleandoc(command.help or "").replace("\b", "")]
    if below := getattr(command, "commands", None):
        return [*text, *(part for each in below for part in _command(f"{name} {each}", below[each]))]
    panels: dict[str, list[tuple[str, str]]] = {}
    for each in command.params:
        if each.name not in {"config", "help"}:
            panel = getattr(each, "rich_help_panel", None) or "Arguments and options"
            panels.setdefault(panel, []).append((_names(each), _cell(each.help or "")))
    for panel, rows in panels.items():
        text += [f"**{panel}**", table(("flag", ""), rows)]
    return text


def _names(parameter: Any) -> str:  # noqa: ANN401
    if isinstance(parameter, typer.core.TyperArgument):
        return f"`{parameter.metavar or parameter.name.upper()}`"
    names = [*parameter.opts, *parameter.secondary_opts]
    return ", ".join(f"`{name}`" for name in names) + (f" {parameter.metavar}" if parameter.metavar else "")


def policies() -> str:
    """Return a page with the entries of all registries."""
    registries: dict[str, tuple[str, Mapping[str, object]]] = {
        "Routers": ("`--router`: which instances get a request.", ROUTERS),
        "Batchers": ("`--batcher`: which work goes into the next iteration of an instance.", BATCHERS),
        "Eviction of cached KV": ("`--kv-eviction`", EVICTIONS),
        "Engines": ("`--engine` of `twofold serve`", ENGINES),
        "Performance models": ("`--performance`: how long an iteration takes in a simulation.", PERFORMANCE_MODELS),
    }
    text = ["# Policies and engines", "[How to add one](../how-to/add-a-policy.md): one file and one registry line."]
    for title, (what, registry) in registries.items():
        text += [
            f"## {title}",
            what,
            table(("name", ""), [(f"`{name}`", summary(it)) for name, it in registry.items()]),
        ]
    names = ", ".join(f"`{name}`" for name in TRANSPORTS)
    return "\n\n".join(
        [*text, "## Transports", f"`--transport`: {names} ([KV transfer](../architecture.md#kv-transfer))."]
    )


def python() -> str:
    """Return a page with the functions and classes that `twofold` exports."""
    text = [
        "# Python",
        "`import twofold`; names are imported on first use. [A notebook](../notebooks/is-splitting-worth-it.md).",
    ]
    for name in sorted(api.__all__, key=lambda name: (not name.islower(), name)):
        found = getattr(api, name)
        text += [f"## twofold.{name}", *_docstring(found)]
        if inspect.isclass(found) and found is not api.UserError:
            for method, value in inspect.getmembers(found, _has_page):
                text += [f"### {name}.{method}{_arguments(value)}", *_docstring(value)]
    return "\n\n".join(text)


def _has_page(member: object) -> bool:
    return (inspect.isroutine(member) or isinstance(member, property)) and not _name(member).startswith("_")


def _name(member: object) -> str:
    return str(getattr(member.fget if isinstance(member, property) else member, "__name__", "_"))


def _arguments(member: Any) -> str:  # noqa: ANN401
    if isinstance(member, property):
        return ""
    names = [name for name in inspect.signature(member).parameters if name != "self"]
    return f"({', '.join(names)})"


def _docstring(member: object) -> list[str]:
    """Return the paragraphs of a docstring, and a table of its keyword arguments."""
    text, _, keywords = (inspect.getdoc(member) or "").partition("\n\nKeyword arguments:\n")
    rows = [line.strip().split(": ", 1) for line in keywords.splitlines()]
    return [text, table(("argument", ""), [(f"`{name}`", help_text) for name, help_text in rows])] if rows else [text]


def requests() -> str:
    """Return a page with the fields of every HTTP request."""
    described = openapi("MODEL", keys=True)
    schemas = described["components"]["schemas"]
    text = ["# HTTP requests, field by field", "From `GET /openapi.json`. [The API](../api.md) describes them."]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            text += [f"## {method.upper()} {path}", operation.get("summary", "")]
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            fields = schemas.get(body.get("$ref", "").rpartition("/")[2], body).get("properties", {})
            rows = [(f"`{name}`", _kind(field), str(field.get("default", ""))) for name, field in fields.items()]
            if rows:
                text.append(table(("field", "type", "default"), rows))
    return "\n\n".join(text)


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema["enum"])
    kind = str(schema.get("type", "anything"))
    return f"list of {_kind(schema['items'])}" if isinstance(schema.get("items"), dict) and schema["items"] else kind


def catalog() -> str:
    """Return a page with the machines, accelerators and models of the catalog."""
    found = load_catalog(())
    machines = [
        (f"`{it.name}`", f"{it.count}× {it.accelerator.name}", f"{it.price_per_h:g}", f"{it.tdp_w / 1e3:.1f}")
        for it in found.machines.values()
    ]
    accelerators = [
        (
            f"`{it.name}`",
            f"{it.memory_bytes / 1e9:.0f}",
            f"{it.memory_bytes_per_s / 1e12:.2f}",
            f"{it.flops_per_s / 1e12:.0f}",
        )
        for it in found.accelerators.values()
    ]
    models = [
        (f"`{it.name}`", f"{it.parameters / 1e9:.1f}", f"{it.active_parameters / 1e9:.1f}", f"{it.layers}")
        for it in found.models.values()
    ]
    return "\n\n".join(
        [
            "# Catalog",
            "`twofold catalog` shows all figures, with `--sources` their sources; `--catalog FILE` adds entries.",
            "## Machines",
            table(("", "accelerators", "$/h", "power, kW"), machines),
            "## Accelerators",
            table(("", "memory, GB", "bandwidth, TB/s", "bf16, TFLOP/s"), accelerators),
            "## Models",
            table(("", "parameters, 10⁹", "of them for a token", "layers"), models),
        ]
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *([_cell(each) for each in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    lines = (line.strip() for line in text.replace("\b", "").splitlines())
    return "<br>".join(line for line in lines if line).replace("|", "\\|").replace("\\[", "[")
