"""Two vLLM servers behind a gateway (`twofold route`)."""

from dataclasses import dataclass

import pytest

from support.running_service import ROUTE, running_service
from support.vllm_servers import NAME, VllmServer, vllm_servers


@dataclass
class RoutedFleet:
    """A gateway's URL and process, and the two vLLM servers behind the gateway."""

    url: str
    process: object
    prefill: VllmServer
    decode: VllmServer

    @property
    def servers(self):
        return (self.prefill, self.decode)


@pytest.fixture(scope="session")
def vllm_pair(tiny_model_dir, tmp_path_factory):
    """Yield a model directory and two vLLM servers of that model, started once per test session."""
    pytest.importorskip("vllm")
    pytest.importorskip("nixl", reason="vLLM's NixlConnector needs the package nixl")
    model = tiny_model_dir("llama")
    with vllm_servers(model, tmp_path_factory.mktemp("vllm"), 2) as servers:
        yield model, servers


def routed_fleet(vllm_pair, probe_timeout, directory):
    """Yield a gateway with a prefill server and a decode server; the gateway's log is in `directory`."""
    model, (prefill, decode) = vllm_pair
    flags = (
        *("--model", str(model), "--served-model-name", NAME, "--router", "jsq-planned"),
        *("--prefill", prefill.url, "--decode", decode.url),
        *("--max-restart-delay", "1", "--probe-timeout", str(probe_timeout)),
    )
    with running_service(None, *flags, program=ROUTE, log=directory / "gateway.log") as (process, url):
        yield RoutedFleet(url, process, prefill, decode)


@pytest.fixture(scope="module")
def fleet(vllm_pair, tmp_path_factory):
    """Yield a gateway with two vLLM servers and a probe timeout of 600 seconds."""
    yield from routed_fleet(vllm_pair, 600, tmp_path_factory.mktemp("fleet"))


@pytest.fixture(scope="module")
def watched_fleet(vllm_pair, tmp_path_factory):
    """Yield a gateway with a probe timeout that is short enough to detect a hung server."""
    yield from routed_fleet(vllm_pair, 20, tmp_path_factory.mktemp("watched-fleet"))
