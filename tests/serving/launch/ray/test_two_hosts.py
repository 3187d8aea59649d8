"""A service on a Ray cluster over two emulated hosts; the tests cut the link between the hosts."""

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from support.ray_service import answers_of, processes_of, ray_service, under_load
from support.waiting import until
from twofold.bench.services import free_port

pytest.importorskip("ray")

from support.ray_cluster import PATIENT

CUT_S = 9.0  # workers behind the cut must have ended by then


@contextmanager
def raylet(command):
    """Run the `ray start` command while the context is open, then kill its processes."""
    process = subprocess.Popen(command, env=os.environ | PATIENT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                each.kill()
        process.wait()


@pytest.fixture(scope="module")
def cluster(hosts):
    """Yield the address of a Ray cluster with room for two workers on this host and one on the other."""
    here, there = hosts.addresses
    start = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--object-store-memory=80000000"]
    with ExitStack() as running:
        for _ in range(5):
            address = f"{here}:{free_port()}"
            head = ["--head", f"--port={address.rpartition(':')[2]}", "--num-cpus=2", "--include-dashboard=false"]
            process = running.enter_context(raylet([*start, *head, f"--node-ip-address={here}"]))
            until(lambda at=address, ray=process: answers_at(here, at) or ray.poll() is not None)
            if process.poll() is None:
                break  # otherwise another server, such as one of Ray's own, has the port
        else:
            pytest.fail("Ray's head ended at each start")
        other = [f"--address={address}", "--num-cpus=1"]
        running.enter_context(raylet(hosts.command(1, [*start, *other, f"--node-ip-address={there}"])))
        yield address


def answers_at(host, address):
    try:
        socket.create_connection((host, int(address.rpartition(":")[2])), 1.0).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def service(cluster, tiny_model_dir, tmp_path_factory):
    flags = ("--prefill", "1", "--decode", "1", "--max-restart-delay", "1")
    with ray_service(tiny_model_dir("llama"), cluster, tmp_path_factory.mktemp("ray"), *flags) as running:
        yield running


def test_a_cut_link_breaks_no_stream(service, hosts, tiny_model_dir):
    """If the link is cut, the remote worker ends, and the service starts a replacement on the local host."""
    nodes = service.nodes()
    before = {name: processes_of(name) for name in nodes}
    assert len(set(nodes.values())) == 2

    def cut():
        hosts.cut()
        time.sleep(CUT_S)
        hosts.restore()
        until(lambda: service.nodes() != nodes and len(service.up()) == 2)

    under_load(service, answers_of(tiny_model_dir("llama")), cut)
    (moved,) = [name for name, node in service.nodes().items() if node != nodes[name]]
    assert not any(process.is_running() for process in before[moved])
    assert len(set(service.nodes().values())) == 1
