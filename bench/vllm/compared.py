"""Systems that four_way.py compares; each is a set of processes behind one URL."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from started import Processes
from stock_vllm import HERE, SERVED_NAME, StockVllm, check_proxy

from twofold.bench.services import free_port

TWOFOLD = [sys.executable, "-m", "twofold.cli.main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings that all compared systems share."""

    stock: StockVllm
    max_model_len: int
    proxy: Path | None
    transport: str


@dataclass(frozen=True, slots=True)
class System:
    """A compared system. `start` starts its processes and returns its URL when it is ready."""

    title: str
    start: Callable[[Setting, Processes], str]


def vllm_colocated(setting: Setting, processes: Processes) -> str:
    return setting.stock.colocated(processes)


def vllm_nixl(setting: Setting, processes: Processes) -> str:
    return setting.stock.proxied(processes, check_proxy(setting.proxy))


def vllm_routed(setting: Setting, processes: Processes) -> str:
    prefill, decode = setting.stock.pair(processes)
    servers = ["--prefill", f"http://{HERE}:{prefill}", "--decode", f"http://{HERE}:{decode}"]
    model = ["--model", str(setting.stock.model), "--served-model-name", SERVED_NAME]
    return _twofold(setting, processes, ["route", *model, *servers])


def vllm_twofold(setting: Setting, processes: Processes) -> str:
    return _served(setting, processes, ["--engine", "vllm", "--prefill", "1", "--decode", "1"])


def torch_split(setting: Setting, processes: Processes) -> str:
    return _served(setting, processes, ["--prefill", "1", "--decode", "1"])


def torch_colocated(setting: Setting, processes: Processes) -> str:
    return _served(setting, processes, ["--colocated", "1"])


SYSTEMS = {
    "vllm-colocated": System("vLLM, colocated", vllm_colocated),
    "vllm-nixl": System("vLLM, split by its NixlConnector and its example proxy", vllm_nixl),
    "vllm-twofold": System("vLLM, split by Twofold", vllm_twofold),
    "vllm-routed": System("vLLM's own servers with NixlConnector, behind `twofold route`", vllm_routed),
    "torch-split": System("Twofold's torch engine, split", torch_split),
    "torch-colocated": System("Twofold's torch engine, colocated", torch_colocated),
}


def _served(setting: Setting, processes: Processes, flags: list[str]) -> str:
    command = ["serve", str(setting.stock.model), "--served-model-name", SERVED_NAME, "--dtype", "float32"]
    command += ["--max-model-len", str(setting.max_model_len), "--no-enable-prefix-caching"]
    return _twofold(setting, processes, [*command, "--transport", setting.transport, *flags])


def _twofold(setting: Setting, processes: Processes, command: list[str]) -> str:
    port = free_port()
    processes.start("twofold", [*TWOFOLD, *command, "--port", str(port)], setting.stock.environment)
    processes.wait(f"http://{HERE}:{port}/health")
    return f"http://{HERE}:{port}"
