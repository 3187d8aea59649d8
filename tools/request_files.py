"""Count the source files that one request executes, in the live service and in the simulator.

    python tools/request_files.py [--list]

A file counts if one of its functions is called between the request's arrival and its last token. Service and simulation
have one prefill and one decode worker; the service uses the emulated engine.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

LIVE_LIMIT = 60
SIMULATED_LIMIT = 20
_TRACER = """
import os, signal, sys, threading
_files, _on = set(), [False]
_out = os.environ["TWOFOLD_TRACE_DIR"]
def _profile(frame, event, arg):
    if event == "call" and _on[0]:
        _files.add(frame.f_code.co_filename)
def _start(*_):
    _files.clear()
    _on[0] = True
    open(os.path.join(_out, f"{os.getpid()}.on"), "w").close()
def _stop(*_):
    _on[0] = False
    path = os.path.join(_out, f"{os.getpid()}.files")
    with open(path + "~", "w") as file:
        file.write("\\n".join(_files))
    os.rename(path + "~", path)
signal.signal(signal.SIGUSR1, _start)
signal.signal(signal.SIGUSR2, _stop)
threading.setprofile(_profile)
sys.setprofile(_profile)
"""


def live(package: Path) -> dict[str, set[str]]:
    """Serve one request, and return the source files that each process of the service executes."""
    import psutil  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(_TRACER)
        port = free_port()
        command = [sys.executable, "-m", "twofold.cli.main", "serve", "--engine", "emulated", "--prefill", "1",
                   "--decode", "1", "--cluster", str(_cluster_file(folder)), "--port", str(port)]  # fmt: skip
        paths = [folder, str(package.parent), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "TWOFOLD_TRACE_DIR": folder, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        service = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
        try:
            wait(lambda: healthy(port))
            ask(port)  # the first request also imports modules and fills caches
            workers = [p for p in psutil.Process(service.pid).children(recursive=True) if not p.children()]
            processes = {"gateway": service.pid, **{f"worker {n}": p.pid for n, p in enumerate(workers)}}
            _signal(processes.values(), signal.SIGUSR1, folder, "on")
            ask(port)
            _signal(processes.values(), signal.SIGUSR2, folder, "files")
            return {
                name: _ours(Path(folder, f"{pid}.files").read_text().splitlines(), package)
                for name, pid in processes.items()
            }
        finally:
            service.terminate()
            service.wait()


def simulated(package: Path) -> set[str]:
    """Simulate one request; return the files that the simulation executes."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(package.parent), os.environ.get("PYTHONPATH", "")]
        run = subprocess.run(
            [sys.executable, "-c", _SIMULATED.format(cluster=str(_cluster_file(folder)))],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return _ours(json.loads(run.stdout), package)


_SIMULATED = """
import json, sys
from pathlib import Path
from twofold.cluster.file import load_cluster
from twofold.hardware.catalog import load_catalog
from twofold.request import Request
from twofold.simulation.kernel import Kernel
from twofold.simulation.simulate import simulate
files = set()
run = Kernel.run
def traced(self, *args, **kwargs):
    sys.setprofile(lambda frame, event, arg: event == "call" and files.add(frame.f_code.co_filename))
    try:
        return run(self, *args, **kwargs)
    finally:
        sys.setprofile(None)
Kernel.run = traced
catalog = load_catalog()
spec = load_cluster(Path({cluster!r}), catalog=catalog)
request = Request(id="0", arrival_s=0.0, prompt_tokens=1000, output_tokens=20)
assert simulate(spec, [request], catalog=catalog, series=False).completed == 1
print(json.dumps(sorted(files)))
"""
CLUSTER = """
model: llama2-70b
router: jsq
pools:
  - {machines: 1, machine: dgx-h100, role: prefill}
  - {machines: 1, machine: dgx-h100, role: decode}
"""


def _cluster_file(folder: str) -> Path:
    path = Path(folder, "cluster.yaml")
    path.write_text(CLUSTER)
    return path


def _ours(files: Iterable[str], package: Path) -> set[str]:
    return {str(Path(file).relative_to(package)) for file in files if Path(file).is_relative_to(package)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ask(port: int, model: str = "llama2-70b") -> None:
    body = {"model": model, "prompt": list(range(300)), "max_tokens": 8, "stream": True, "ignore_eos": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310  (our own service)
        if b"[DONE]" not in answer.read():
            sys.exit("the service did not finish its answer")


def _signal(pids: Iterable[int], number: int, folder: str, suffix: str) -> None:
    for pid in pids:
        os.kill(pid, number)
        wait(Path(folder, f"{pid}.{suffix}").exists)


def wait(happened: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        if time.monotonic() > deadline:
            sys.exit("the service did not start, or a process of it did not answer")
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the files")
    parser.add_argument("--package", type=Path, default=Path(__file__).parent.parent / "src" / "twofold")
    arguments = parser.parse_args()
    package = arguments.package.resolve()
    processes = live(package)
    every = set().union(*processes.values())
    one = simulated(package)
    by_process = ", ".join(f"{name} {len(files)}" for name, files in processes.items())
    print(f"live: {len(every)} files of at most {LIVE_LIMIT} ({by_process})")
    print(f"simulated: {len(one)} files of at most {SIMULATED_LIMIT}")
    if arguments.list:
        for name, files in [*processes.items(), ("simulated", one)]:
            print(f"\n{name}\n  " + "\n  ".join(sorted(files)))
    return int(len(every) > LIVE_LIMIT or len(one) > SIMULATED_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
