"""vLLM's own servers on a CPU: one server, or a pair connected by NixlConnector."""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from started import Processes

from twofold.bench.services import free_port
from twofold.errors import ConfigurationError

SERVED_NAME = "compared"
PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
HERE = "127.0.0.1"
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def vllm_environment(folder: Path) -> dict[str, str]:
    """Return environment variables for vLLM on a CPU. Raises ConfigurationError if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigurationError(f"vLLM is not installed for {sys.executable}: `make test-vllm` sets one up")
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": HERE,
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "*",
    }
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # the CPU wheel has another name that vLLM's CLI does not expect
        version = f"{importlib.metadata.version('vllm-cpu')}+cpu"  # vLLM detects its platform by this suffix
        card = folder / f"vllm-{version}.dist-info" / "METADATA"
        card.parent.mkdir(exist_ok=True)
        card.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(folder))))
    return environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Address, command prefix and environment of a server."""

    address: str = HERE
    enter: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


BESIDE = Place()


@dataclass(frozen=True, slots=True, kw_only=True)
class StockVllm:
    """Starter of `vllm serve` processes for one model, in float32 and without prefix caching."""

    model: Path
    environment: Mapping[str, str]
    flags: Sequence[str]
    threads: int  # total over all servers

    def colocated(
        self, processes: Processes, place: Place = BESIDE, *, threads: int | None = None, name: str = "colocated"
    ) -> str:
        """Start one server for both phases, which logs to `name`.log, and return its URL."""
        port = self._serve(processes, name, place, threads or self.threads, {}, ())
        return ready(processes, place, port)

    def pair(self, processes: Processes, places: tuple[Place, Place] = (BESIDE, BESIDE)) -> tuple[int, int]:
        """Start a prefill and a decode server with NixlConnector. Return their ports."""
        _need_nixl()
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        ports = []
        for name, place in zip(("prefill", "decode"), places, strict=True):
            side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": place.address, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            flags = ("--kv-transfer-config", msgspec.json.encode(transfer).decode())
            ports.append(self._serve(processes, name, place, max(1, self.threads // 2), side, flags))
        prefill, decode = ports
        for place, port in zip(places, ports, strict=True):
            ready(processes, place, port)
        return prefill, decode

    def proxied(self, processes: Processes, proxy: Path, places: tuple[Place, Place] = (BESIDE, BESIDE)) -> str:
        """Start a prefill and a decode server behind the example proxy of vLLM's repository. Return the proxy's URL."""
        prefill, decode = self.pair(processes, places)
        port = free_port()
        command = [sys.executable, str(proxy), "--port", str(port)]
        command += ["--prefiller-hosts", places[0].address, "--prefiller-ports", str(prefill)]
        command += ["--decoder-hosts", places[1].address, "--decoder-ports", str(decode)]
        processes.start("proxy", command, self.environment)
        processes.wait(f"http://{HERE}:{port}/healthcheck")
        return f"http://{HERE}:{port}"

    def _serve(
        self,
        processes: Processes,
        name: str,
        place: Place,
        threads: int,
        environment: Mapping[str, str],
        flags: Sequence[str],
    ) -> int:
        port = free_port()
        command = [*place.enter, *VLLM, "serve", str(self.model), "--served-model-name", SERVED_NAME]
        command += ["--host", place.address, "--port", str(port), "--dtype", "float32", "--enforce-eager"]
        command += ["--no-enable-prefix-caching", *self.flags, *flags]
        threads_of = {"OMP_NUM_THREADS": str(threads)}
        processes.start(name, command, {**self.environment, **threads_of, **place.environment, **environment})
        return port


def ready(processes: Processes, place: Place, port: int) -> str:
    """Wait until a server is healthy and return its URL."""
    url = f"http://{place.address}:{port}"
    processes.wait(f"{url}/health")
    return url


def check_proxy(proxy: Path | None) -> Path:
    """Return the path of vLLM's example proxy. Raises ConfigurationError if the file does not exist."""
    if proxy is None or not proxy.is_file():
        where = f"vLLM's example proxy, {PROXY} of https://github.com/vllm-project/vllm"
        raise ConfigurationError(f"--proxy must name {where}: download it, or skip its system with --only")
    return proxy


def _need_nixl() -> None:
    if importlib.util.find_spec("nixl") is None:
        version = importlib.metadata.version("nixl-cu12")
        raise ConfigurationError(f"vLLM's NixlConnector needs the package nixl: pip install --no-deps nixl=={version}")
