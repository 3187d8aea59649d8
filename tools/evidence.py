"""Run the benchmarks behind the documentation's claims, record their figures, and check the pages that show them.

    python tools/evidence.py run [NAME …]    run the benchmarks that this machine can run, then `write`
    python tools/evidence.py write           write docs/evidence.md and the marked figures of README.md
    python tools/evidence.py check           exit with 1 if a figure of these pages differs from its record or has none
    python tools/evidence.py list            names, minutes, and what is missing here

Results are in docs/evidence.json, entries in tools/evidence_entries.py. A skipped or failed entry keeps its recorded
result. `run` exits with 1 if a benchmark fails or takes three times its minutes (`--patience`); the others still run.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from evidence_entry import ROOT, Entry, Machine, Record
from evidence_pages import PageError, problems, write
from twofold.bench.real_data import data_folder
from twofold.reporting.output import json_text

JSON = Path("docs/evidence.json")
LOGS = Path("build/evidence")  # what each benchmark printed


class BenchmarkError(Exception):
    """A benchmark failed, or its results lack a figure."""


def recorded(root: Path) -> dict[str, Record]:
    path = root / JSON
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Record]) if path.exists() else {}


def run(entries: Sequence[Entry], names: Sequence[str], root: Path, patience: float) -> list[str]:
    """Run entries, and write each result to the records file. Return the failures.

    A benchmark may take `patience` times its minutes.
    """
    failures = []
    for entry in entries:
        if names and entry.name not in names:
            continue
        if reason := entry.missing():
            print(f"{entry.name}: skipped, {reason}", flush=True)
            continue
        print(f"{entry.name}: about {entry.minutes:g} min …", flush=True)
        try:
            record = measure(entry, root, 60 * patience * entry.minutes)
        except BenchmarkError as error:
            failures.append(f"{entry.name}: {error}")
            print(f"{entry.name}: FAILED, {error}", flush=True)
            continue
        records = {**recorded(root), entry.name: record}
        (root / JSON).write_text(json_text(records) + "\n", "utf-8")
        shown = ", ".join(f"{name} {figure}" for name, figure in record.figures.items())
        print(f"{entry.name}: {record.seconds:.0f} s: {shown}", flush=True)
    return failures


def measure(entry: Entry, root: Path, limit_s: float) -> Record:
    """Run an entry's command and read its figures. Raises BenchmarkError."""
    folder = root / LOGS
    folder.mkdir(parents=True, exist_ok=True)
    result, log = folder / f"{entry.name}.json", folder / f"{entry.name}.log"
    result.unlink(missing_ok=True)
    line = entry.command
    if not entry.text:
        line += " --json" if entry.stdout else f" --json {shlex.quote(str(result))}"
    load, began_s = os.getloadavg()[0], time.monotonic()
    printed = _output(line, limit_s, root, log)
    try:
        report = printed if entry.text else json.loads(printed if entry.stdout else result.read_text())
        figures = entry.read(report)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise BenchmarkError(f"its result has no such figure ({error!r}); see {log}") from error
    return Record(
        command=entry.command,
        date=time.strftime("%Y-%m-%d"),
        machine=machine(),
        versions=versions(entry, root),
        figures=figures,
        seconds=round(time.monotonic() - began_s, 1),
        load=round(load, 2),
    )


def _output(line: str, limit_s: float, root: Path, log: Path) -> str:
    # `python` and `twofold` in the line are those of this environment. Others find the data by the variable.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    env = {**os.environ, "PATH": path, "TWOFOLD_DATA": str(data_folder())}
    with log.open("w") as errors:
        process = subprocess.Popen(
            ["bash", "-c", line], cwd=root, env=env, stdout=subprocess.PIPE, stderr=errors, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            raise BenchmarkError(f"no end within {limit_s / 60:.0f} minutes; see {log}") from None
        except BaseException:
            _end(process)
            raise
        errors.write(printed)
    if process.returncode:
        raise BenchmarkError(f"exit status {process.returncode}; see {log}")
    return printed


def _end(process: subprocess.Popen[str]) -> None:
    """End a benchmark and the services that it started: first by SIGTERM, so that it can stop them."""
    for number, patience_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
            process.communicate(timeout=patience_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def machine() -> Machine:
    """Return a description of this machine."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text() if info.exists() else "", re.MULTILINE)
    cpu = found[1] if found else platform.processor() or platform.machine()
    cpu = " ".join(re.sub(r"\((R|TM)\)|\bProcessor\b|\bCPU\b|@.*", " ", cpu).split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    system = f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"
    return Machine(cpu=cpu, cores=len(os.sched_getaffinity(0)), memory_gib=round(memory / 2**30), os=system)


def versions(entry: Entry, root: Path) -> dict[str, str]:
    """Return the versions of twofold, with its commit, and of the packages that a benchmark uses."""
    python = str(root / entry.python) if entry.python else sys.executable
    script = "import importlib.metadata as m, platform, sys\nprint(platform.python_version())\n"
    script += "for name in sys.argv[1:]: print(m.version(name))"
    done = subprocess.run([python, "-c", script, *entry.packages], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"{python} lacks one of {', '.join(entry.packages)}")
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    commit = f" ({git.stdout.strip()})" if git.returncode == 0 else ""
    names = ("python", *entry.packages)
    return {
        "twofold": importlib.metadata.version("twofold") + commit,
        **dict(zip(names, done.stdout.split(), strict=True)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "write", "check", "list"))
    parser.add_argument("names", nargs="*", help="entries to run (default: all)")
    parser.add_argument("--patience", type=float, default=3.0, help="time limit, as a multiple of the usual minutes")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder with README.md and docs/")
    parser.add_argument("--entries", type=Path, default=ROOT / "tools" / "evidence_entries.py")
    given = parser.parse_args()
    listed = runpy.run_path(str(given.entries))
    entries: tuple[Entry, ...] = listed["ENTRIES"]
    allowed: Mapping[str, str] = listed["ALLOWED"]
    unknown = sorted(set(given.names) - {entry.name for entry in entries})
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(entry.name for entry in entries)}")
    failures: list[str] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind the stack to end the benchmark
    if given.action == "list":
        for entry in entries:
            print(f"{entry.name}: {entry.minutes:g} min; {entry.missing() or 'runs here'}")
        return 0
    if given.action == "run":
        failures = run(entries, given.names, given.root, given.patience)
    if given.action == "check":
        failures = list(problems(entries, allowed, recorded(given.root), given.root))
    else:
        try:
            write(entries, recorded(given.root), given.root)
        except PageError as error:
            failures.append(str(error))
    for failure in failures:
        print(failure, file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
