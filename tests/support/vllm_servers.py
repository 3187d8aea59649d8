"""Unmodified `vllm serve` processes on the CPU, which the tests start without Twofold."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import httpx
import psutil

from twofold.bench.services import free_port, metrics, wait_ready

NAME = "tiny"
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"


class VllmServer:
    """A vLLM server process, which a test may kill and restart."""

    def __init__(self, model: Path, directory: Path, *, lease_s: int = 30) -> None:
        self.port, self._side_port, self.events_port = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.events = f"tcp://127.0.0.1:{self.events_port}"
        self._model, self._directory, self._lease_s = model, directory, lease_s
        self.process: subprocess.Popen[bytes] | None = None
        self._children: list[psutil.Process] = []

    def start(self) -> None:
        """Start the server without waiting until it is ready."""
        with (self._directory / f"vllm-{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command(), stdout=log, stderr=log, env=self._environment(), start_new_session=True
            )

    def wait(self) -> None:
        assert self.process is not None
        assert wait_ready(self.process, self.url), f"see {self._directory}/vllm-{self.port}.log"
        self._children = psutil.Process(self.process.pid).children(recursive=True)

    def send(self, number: int) -> None:
        """Send a signal to all processes of the server."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Kill the server and wait until its processes have ended."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):  # ended by a test
            self.send(signal.SIGKILL)
        self.process.wait()
        psutil.wait_procs(self._children, timeout=600)  # they hold the ports
        self.process = None

    def complete(self, **fields: object) -> list[int]:
        """Send a completion request directly to this server and return the output token ids."""
        body = {"model": NAME, "return_token_ids": True, "temperature": 0, "ignore_eos": True, **fields}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    def metric(self, name: str) -> float:
        """Return the current value of a vLLM metric."""
        self.complete(prompt=[7] * 3, max_tokens=2)  # vLLM updates its metrics only in engine steps
        values = [
            float(line.split()[-1]) for line in metrics(self.url).splitlines() if line.startswith(f"vllm:{name}{{")
        ]
        assert values, f"vLLM has no metric {name}"
        return sum(values)

    def frees_all_blocks(self, *, tries: int = 300) -> bool:
        """Wait until every KV block of the server is free; return False on timeout."""
        for _ in range(tries):
            if self.metric("kv_cache_usage_perc") == 0.0:
                return True
            time.sleep(0.2)
        return False

    def _command(self) -> list[str]:
        connector = {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": self._lease_s},
        }
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{self.events_port}"}
        # vLLM 0.32 on CPU crashes on chunked prefill of a request with a seed.
        flags = ["--enforce-eager", "--dtype", "float32", "--no-enable-chunked-prefill"]
        flags += ["--served-model-name", NAME, "--max-num-batched-tokens", "4096"]
        return [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(self._model)),
            *("--host", "127.0.0.1", "--port", str(self.port), *flags),
            *("--kv-transfer-config", json.dumps(connector), "--kv-events-config", json.dumps(events)),
        ]

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (_metadata(), os.environ.get("PYTHONPATH")))),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._side_port),
            "UCX_TLS": "tcp,self,sm",
            "OMP_NUM_THREADS": "1",
        }


def _metadata() -> str:
    """Write package metadata for `vllm` if vLLM is installed as `vllm-cpu`. Return the directory of the
    metadata, or "" if no metadata is needed.
    """
    try:
        version("vllm")
    except PackageNotFoundError:
        directory = Path(tempfile.gettempdir()) / f"vllm-metadata-{os.getuid()}"
        number = version("vllm-cpu")
        info = directory / f"vllm-{number}+cpu.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(METADATA.format(version=number))
        return str(directory)
    return ""


@contextmanager
def vllm_servers(model: Path, directory: Path, count: int):
    """Start `count` servers of one model in parallel, and run them while the context is open."""
    servers = [VllmServer(model, directory) for _ in range(count)]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()
