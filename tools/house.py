"""Check the source tree for import cycles, forbidden imports, large folders, misplaced modules and duplicate classes.

    python tools/house.py

Prints one line per violation, and exits with 1 if there is any. import-linter checks the layers (see pyproject.toml).
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "twofold"
MAX_FILES_IN_FOLDER = 15
# A folder of policies grows by one file with each policy.
REGISTRIES = {"scheduling/routers", "scheduling/batchers", "kvcache/eviction"}
LOOSE_IN_SERVING = {"__init__.py", "config.py", "messages.py"}
# The live packages must not import the simulation.
FORBIDDEN = [(room, "twofold.simulation") for room in ("serving", "engine", "transport")]


def modules() -> dict[str, ast.Module]:
    """Return a dict that maps the dotted name of each module of `twofold` to its syntax tree."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("twofold", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def imports(name: str, known: dict[str, ast.Module]) -> Iterator[str]:
    """Yield the modules of `twofold` that a module imports."""
    for node in ast.walk(known[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                target = f"{node.module}.{alias.name}"
                if target in known:
                    yield target
                elif node.module in known:
                    yield node.module


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of an import cycle, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def import_violations(known: dict[str, ast.Module]) -> Iterator[str]:
    graph = {name: set(imports(name, known)) - {name} for name in known}
    if found := circle(graph):
        yield f"import circle: {' <- '.join(found)}"
    for room, forbidden in FORBIDDEN:
        for name, targets in graph.items():
            if name.startswith(f"twofold.{room}"):
                yield from (f"{name} imports {target}" for target in sorted(targets) if target.startswith(forbidden))


def folder_violations() -> Iterator[str]:
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")}):
        room = folder.relative_to(PACKAGE).as_posix()
        count = len([path for path in folder.glob("*.py") if path.name != "__init__.py"])
        if count > MAX_FILES_IN_FOLDER and room not in REGISTRIES:
            yield f"{room}: {count} files; split it or merge what is read together (at most {MAX_FILES_IN_FOLDER})"
    for path in sorted((PACKAGE / "serving").glob("*.py")):
        if path.name not in LOOSE_IN_SERVING:
            yield f"serving/{path.name}: move it into a folder of serving/"


def name_violations(known: dict[str, ast.Module]) -> Iterator[str]:
    classes = defaultdict(list)
    for name, tree in known.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(name)
    for class_name, places in sorted(classes.items()):
        if len(places) > 1:
            yield f"class {class_name} is defined {len(places)} times: {', '.join(places)}"


def main() -> int:
    known = modules()
    found = [*import_violations(known), *folder_violations(), *name_violations(known)]
    for violation in found:
        print(violation)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
