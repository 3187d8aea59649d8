"""A service on a Ray cluster of three nodes whose raylets are killed under load."""

import pytest

from support.ray_service import answers_of, processes_of, ray_service, under_load, until
from twofold.cli import pools_run

pytest.importorskip("ray")

from support.ray_cluster import ray_nodes

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module")
def answers(tiny_model_dir):
    return answers_of(tiny_model_dir("llama"))


@pytest.fixture(scope="module")
def cluster():
    """Three nodes with room for four workers: the head has room for two."""
    with ray_nodes(2) as nodes:
        for _ in range(2):
            nodes.add(1)
        yield nodes


@pytest.fixture(scope="module")
def service(cluster, tiny_model_dir, tmp_path_factory):
    flags = ("--prefill", "1", "--decode", "2", "--max-restart-delay", "1")
    with ray_service(
        tiny_model_dir("llama"), cluster.address, tmp_path_factory.mktemp("ray"), *flags
    ) as running:
        until(lambda: len(running.up()) == 3)
        yield running


def test_workers_are_spread_over_the_nodes(service, cluster):
    """Those of a phase most of all."""
    nodes = service.nodes()
    assert nodes["decode-0"] != nodes["decode-1"]
    assert len(set(nodes.values())) == 3


def test_a_node_that_is_lost_is_made_up_for_on_those_left(service, cluster, answers):
    """Its worker has certainly ended, and then there is another one where there is room."""
    lost = next(node for node in service.nodes().values() if node != cluster.head)
    (worker,) = [name for name, node in service.nodes().items() if node == lost]
    before = processes_of(worker)
    assert len(before) == 1

    def kill():
        cluster.kill(lost)
        until(lambda: service.nodes()[worker] != lost and len(service.up()) == 3)

    under_load(service, answers, kill)
    assert not any(process.is_running() for process in before)
    assert service.nodes()[worker] == cluster.head


def test_with_too_little_room_the_plan_is_made_smaller_and_whole_again(service, cluster, answers):
    """Two nodes of three are gone: two workers are left, one for each phase, until there is a new node."""
    (lost,) = set(service.nodes().values()) - {cluster.head}

    def kill():
        cluster.kill(lost)
        until(lambda: "1P+1D for what is left" in " ".join(service.said.split()))
        until(lambda: service.roles_up() == ["decode", "prefill"])

    def add():
        cluster.add(1)
        until(lambda: len(service.up()) == 3)

    under_load(service, answers, kill)
    under_load(service, answers, add)
    assert "all workers have room" in pools_run.ask(service.url, None).replans[-1]
    assert {role for role, _ in service.states().values()} == {"prefill", "decode"}


def test_it_leaves_nothing_behind(service, cluster):
    """The last test of this service: its actors and their children end with it."""
    family = [one for name in service.up() for one in processes_of(name)]
    assert len(family) == 3
    service.process.kill()
    service.process.wait()
    until(lambda: not any(one.is_running() and one.status() != "zombie" for one in family))
