"""Start vLLM with prefill and decode on two hosts, connected by vLLM's NixlConnector or by Twofold."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from compared import TWOFOLD
from started import Processes
from stock_vllm import SERVED_NAME, Place, StockVllm, check_proxy, ready

from twofold.bench.services import free_port
from twofold.security.key import write_key

sys.path.append(str(Path(__file__).parents[1]))
from two_hosts import TwoHosts

NIXL = "vllm-nixl"
MODES = ("layer-wise", "serialized", "pull", "by-size")
SPLITS = (NIXL, *MODES)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcrossHosts:
    """Starter of vLLM on two hosts: prefill on the first, decode on the second."""

    hosts: TwoHosts
    stock: StockVllm
    proxy: Path | None
    longest: int  # prompt and output, in tokens
    folder: Path

    def start(self, split: str, processes: Processes) -> str:
        """Start vLLM with prefill on one host and decode on another; return the service's URL."""
        if split == NIXL:
            places = (self._place(0), self._place(1))
            return self.stock.proxied(processes, check_proxy(self.proxy), places)
        return self._twofold(split, processes)

    def _twofold(self, mode: str, processes: Processes) -> str:
        here, there = self._place(0), self._place(1)
        key, port = self.folder / "cluster.key", free_port()
        key.unlink(missing_ok=True)
        write_key(key)
        controller = f"tcp://{here.address}:{free_port()}"
        joint = ["--cluster-key", str(key)]
        serve = ["serve", str(self.stock.model), "--served-model-name", SERVED_NAME, "--port", str(port)]
        serve += ["--engine", "vllm", "--prefill", "1", "--decode", "0", "--listen-workers", controller, *joint]
        serve += ["--handoff", mode, "--transport", "nixl", "--dtype", "float32", "--no-enable-prefix-caching"]
        serve += ["--max-model-len", str(self.longest), "--max-num-batched-tokens", str(self.longest)]
        join = ["join", controller, *joint, "--model", str(self.stock.model), "--decode", "1"]
        join += ["--name", "decode-host", "--address", there.address]
        for host, (place, command) in enumerate(((here, serve), (there, join))):
            # Workers use all allowed cores; two hosts on one machine would compete.
            whole = ["taskset", "--cpu-list", self._cores(host), *place.enter, *TWOFOLD, *command]
            processes.start(command[0], whole, {**self.stock.environment, **place.environment})
        return ready(processes, Place(), port)

    def _place(self, host: int) -> Place:
        network = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": self.hosts.devices[host]}
        return Place(address=self.hosts.addresses[host], enter=self.hosts.command(host, []), environment=network)

    @staticmethod
    def _cores(host: int) -> str:
        cores = sorted(os.sched_getaffinity(0))
        half = max(1, len(cores) // 2)
        return ",".join(map(str, cores[:half] if host == 0 else cores[half:] or cores))
