"""Check a release: version, contents of the wheels, licences, known vulnerabilities and the container file.

    python tools/release_check.py TOOLS [--dist dist]

TOOLS is the bin folder of an environment with pip-licenses, pip-audit and hadolint (`make release-check` creates it).
The checked dependencies are those of `twofold[serve]` in the environment that runs this script. Prints one line per
problem, and exits with 1 if there is any. An unreachable vulnerability database is reported, but is no problem.
"""

import argparse
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parent.parent
# Licences of possible dependencies of an Apache-2.0 project, as SPDX identifiers or as packages name them.
ALLOWED = {
    *("0BSD", "3-Clause BSD License", "BSD License", "BSD-2-Clause", "BSD-3-Clause"),
    *("Apache", "Apache 2.0 License", "Apache Software License", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"),
    *("ISC", "ISC License ISCL", "MIT", "MIT License", "MIT-0", "MPL-2.0", "Mozilla Public License 2.0 MPL 2.0"),
    *("BSL-1.0", "CC0-1.0", "CNRI-Python", "PSF-2.0", "Python Software Foundation License", "Zlib"),
}
# CUDA's libraries, which torch requires on GPUs, are proprietary. Twofold does not distribute them.
EXEMPT = re.compile(r"nvidia-|cuda-")


def version_problems(root: Path) -> Iterator[str]:
    """Yield the files that name another version than pyproject.toml."""
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    for name, pattern in {
        "CHANGELOG.md": r"^## \[(.+?)\]",
        "src/twofold/__init__.py": r'^__version__ = "(.+)"$',
        "deploy/helm/twofold/Chart.yaml": r"^appVersion: (.+)$",
    }.items():
        found = re.search(pattern, (root / name).read_text(), re.MULTILINE)
        if found is None or found[1] != version:
            yield f"{name} names {found[1] if found else 'no version'}, pyproject.toml {version}"


def wheel_problems(dist: Path, package: Path) -> Iterator[str]:
    """Yield the differences between the wheels in `dist` and the source files of the package."""
    wheels = {wheel: parse_wheel_filename(wheel.name)[3] for wheel in dist.glob("*.whl")}
    pure = [wheel for wheel, tags in wheels.items() if all(tag.platform == "any" for tag in tags)]
    if len(pure) != 1 or len(wheels) != 2:
        yield f"{dist} has {len(pure)} pure and {len(wheels) - len(pure)} compiled wheels, not one of each"
    expected = {
        f"{package.name}/{file.relative_to(package).as_posix()}"
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so"
    }
    for wheel in wheels:
        names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
        machine_code = {name for name in names if name.endswith(".so")}
        if bool(machine_code) is (wheel in pure):
            yield f"{wheel.name} has {len(machine_code)} compiled modules"
        yield from (f"{wheel.name} lacks {name}" for name in sorted(expected - names))
        yield from (f"{wheel.name} has {name}" for name in sorted(names - expected - machine_code))


def dependencies(name: str, extras: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of a package's direct and indirect dependencies in this environment, by name."""
    found: dict[str, str] = {}
    todo, seen = [(name, frozenset(extras))], set()
    while todo:
        package, wanted = todo.pop()
        if (package, wanted) in seen:
            continue
        seen.add((package, wanted))
        try:
            distribution = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError as error:
            raise SystemExit(f"{package} is not installed here: `make setup` installs it") from error
        if package != name:
            found[canonicalize_name(package)] = distribution.version
        todo += [
            (each.name, frozenset(each.extras))
            for each in map(Requirement, distribution.requires or ())
            if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in (*wanted, ""))
        ]
    return found


def compatible(licence: str) -> bool:
    """Whether a package under a licence may be a dependency. `licence` is an SPDX expression, a name, or a text."""
    title = re.sub(r"[()]", "", licence.strip().split("\n")[0])
    clauses = re.split(r" AND |; ", title)
    return all(any(name.strip() in ALLOWED for name in clause.split(" OR ")) for clause in clauses)


def licence_problems(found: Iterable[dict[str, str]]) -> Iterator[str]:
    """Yield the packages without a compatible licence. `found` is the output of pip-licenses."""
    for package in found:
        if not compatible(package["License"]) and not EXEMPT.match(package["Name"]):
            yield f"{package['Name']} has the licence {package['License']!r}"


def vulnerability_problems(audit: dict[str, list[dict[str, object]]]) -> Iterator[str]:
    """Yield the known vulnerabilities, and print how many packages the database did not cover. `audit` is the output
    of pip-audit.
    """
    packages = audit["dependencies"]
    skipped = [package for package in packages if "skip_reason" in package]
    if skipped:
        print(f"The vulnerability database gave no answer for {len(skipped)} of {len(packages)} packages.")
    for package in packages:
        found = package.get("vulns", [])
        assert isinstance(found, list)  # noqa: S101  (for the type checker)
        yield from (f"{package['name']} {package['version']} has {each['id']}" for each in found)


def _output(*command: object) -> tuple[str, str]:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


def environment_problems(tools: Path, packages: dict[str, str]) -> Iterator[str]:
    """Yield the problems that pip-licenses and pip-audit find in the given packages of this environment."""
    licences, error = _output(
        tools / "pip-licenses", "--python", sys.executable, "--from=mixed", "--format=json", "--packages", *packages
    )
    if not licences:
        raise SystemExit(f"pip-licenses failed:\n{error}")
    yield from licence_problems(json.loads(licences))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.writelines(f"{name}=={version.partition('+')[0]}\n" for name, version in packages.items())
        pins.flush()
        audit, error = _output(
            *(tools / "pip-audit", "--requirement", pins.name, "--no-deps", "--disable-pip", "--format=json"),
            *("--progress-spinner=off", "--timeout=5"),
        )
    if audit:
        yield from vulnerability_problems(json.loads(audit))
    else:
        print(f"The vulnerability database is unreachable: {error.strip().splitlines()[-1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", type=Path)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    problems = [*version_problems(ROOT), *wheel_problems(args.dist, ROOT / "src" / "twofold")]
    packages = dependencies("twofold", ["serve"])
    problems += environment_problems(args.tools, packages)
    lint, error = _output(args.tools / "hadolint", "--no-color", ROOT / "deploy" / "container" / "Dockerfile")
    problems += (lint or error).splitlines()
    for problem in problems:
        print(problem)
    print(f"{len(packages)} dependencies checked, {len(problems)} problems found.")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
