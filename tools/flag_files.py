"""Count the source files that the value of a command-line flag passes through.

    python tools/flag_files.py [--list]

The script runs `twofold simulate` and `twofold serve` with a unique value for each flag in `FLAGS`, and
traces the functions that receive this value. The counted files are the file that declares the flag, the
file that uses the value, and the files of the command line, cluster spec and launcher that pass the value
on. Exits with 1 if a flag's count exceeds four.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from request_files import CLUSTER, ask, free_port, healthy, wait

LIMIT = 4
FLAGS: dict[str, dict[str, float]] = {
    "simulate": {"--max-num-batched-tokens": 7919, "--max-num-seqs": 6101, "--block-size": 73, "--rate": 3.1415},
    "serve": {
        "--max-num-batched-tokens": 7919,
        "--max-num-seqs": 6101,
        "--block-size": 73,
        "--max-waiting": 5281,
        "--max-restart-delay": 4517,
        "--request-timeout": 3571,
    },
}
CARRIERS = ("cli/", "cluster/", "serving/launch/", "serving/config.py", "simulation/simulate.py")
PACKAGE = Path(__file__).parent.parent / "src" / "twofold"
_TRACER = """
import atexit, os, sys
_values = {float(text) for text in os.environ["TWOFOLD_TRACE_VALUES"].split()}
_seen = set()
def _profile(frame, event, arg):
    if event == "call" and frame.f_code.co_filename.startswith(os.environ["TWOFOLD_TRACE_PACKAGE"]):
        for value in frame.f_locals.values():
            if type(value) in (int, float) and value in _values and (value, frame.f_code.co_filename) not in _seen:
                _seen.add((value, frame.f_code.co_filename))
                with open(os.environ["TWOFOLD_TRACE_FILE"], "a") as file:
                    file.write(f"{float(value)} {frame.f_code.co_filename}\\n")
sys.setprofile(_profile)
"""


def simulate(folder: Path, flags: list[str]) -> None:
    """Run `twofold simulate` with `flags` while function calls are traced."""
    command = [*_twofold("simulate"), "512+16", "--model", "llama2-70b", "--cluster", str(folder / "cluster.yaml")]
    subprocess.run([*command, *flags, "--num-requests", "10"], check=True, env=_traced(folder), stdout=subprocess.PIPE)


def serve(folder: Path, flags: list[str]) -> None:
    """Run `twofold serve` with `flags` while function calls are traced, and send one request."""
    model, port = folder / "model", free_port()
    shape = ("--hidden-size", "32", "--layers", "2", "--heads", "2", "--kv-heads", "2", "--vocab-size", "512")
    subprocess.run([*_twofold("model"), "create", str(model), *shape], check=True, capture_output=True)
    command = [*_twofold("serve"), str(model), "--prefill", "1", "--decode", "1", "--port", str(port), *flags]
    memory = ("--kv-cache-memory-bytes", "64MiB")
    service = subprocess.Popen([*command, *memory], env=_traced(folder), stderr=subprocess.DEVNULL)
    try:
        wait(lambda: healthy(port))
        ask(port, "model")
    finally:
        service.terminate()
        service.wait()


def _twofold(command: str) -> list[str]:
    return [sys.executable, "-m", "twofold.cli.main", command]


def _traced(folder: Path) -> dict[str, str]:
    values = [value for flags in FLAGS.values() for value in flags.values()]
    paths = [str(folder), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TWOFOLD_TRACE_PACKAGE": str(PACKAGE),
        "TWOFOLD_TRACE_VALUES": " ".join(map(str, values)),
        "TWOFOLD_TRACE_FILE": str(folder / "seen"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the files")
    arguments = parser.parse_args()
    most = 0
    for command, run in (("simulate", simulate), ("serve", serve)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "sitecustomize.py").write_text(_TRACER)
            (folder / "cluster.yaml").write_text(CLUSTER)
            run(folder, [part for flag, value in FLAGS[command].items() for part in (flag, str(value))])
            seen = [line.split(maxsplit=1) for line in (folder / "seen").read_text().splitlines()]
        for flag, value in FLAGS[command].items():
            files = {str(Path(file).relative_to(PACKAGE)) for number, file in seen if float(number) == value}
            carriers = sorted(file for file in files if file.startswith(CARRIERS))
            passed = 1 + len(carriers) + 1
            most = max(most, passed)
            print(f"{command} {flag}: {passed} files of at most {LIMIT}")
            if arguments.list:
                print("  passed on by " + ", ".join(carriers))
                print("  received by  " + ", ".join(sorted(files - set(carriers))))
    return int(most > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
