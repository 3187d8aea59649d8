"""One-line descriptions of registry entries, for help texts."""

import ast
import sys
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path


def summaries(registry: Mapping[str, object]) -> dict[str, str]:
    """Return the first docstring line of each class or function in a registry, by name."""
    return {name: summary(entry) for name, entry in registry.items()}


def summary(entry: object) -> str:
    """Return the first docstring line of a class or function; empty without a docstring."""
    if isinstance(entry, partial):
        entry = entry.func
    doc = getattr(entry, "__doc__", None)
    if not doc:
        doc = _source_docstrings(getattr(entry, "__module__", "")).get(getattr(entry, "__name__", ""), "")
    return doc.partition("\n")[0]


@cache
def _source_docstrings(module: str) -> dict[str, str]:
    """Read the docstrings of a module's source, because compiled classes have none."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return {}
    source = Path(file).with_name(f"{module.rpartition('.')[2]}.py")
    if not source.exists():
        return {}
    definitions = ast.ClassDef | ast.FunctionDef
    body = ast.parse(source.read_text(encoding="utf-8")).body
    return {node.name: ast.get_docstring(node) or "" for node in body if isinstance(node, definitions)}
