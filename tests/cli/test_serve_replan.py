"""`twofold serve --replan`: what it takes, and what it refuses in one sentence."""

from pathlib import Path

import pytest

from support.hosts import profile
from twofold.cli.serve.config import service_of
from twofold.cli.serve_flags import Flags
from twofold.cli.serve.predictions import ReplanFlags, replan_config
from twofold.errors import ConfigurationError
from twofold.performance.host_profile import dump_host_profile
from twofold.serving.config import EngineConfig, ServiceConfig
from twofold.serving.launch.worker_plan import plan_workers
from twofold.slo import Slo

CLUSTER = """
model: llama2-70b
router: {router}
pools:
  - {{machines: 3, machine: h100, role: prefill}}
  - {{machines: 1, machine: h100, role: decode}}
"""
GOOD = ReplanFlags(slo="ttft=1,tpot=0.05")


@pytest.fixture
def cluster(tmp_path):
    def written(router="jsq-planned"):
        path = tmp_path / "cluster.yaml"
        path.write_text(CLUSTER.format(router=router))
        return path

    return written


def test_an_emulated_service_is_planned_by_its_own_cluster(cluster):
    """The machines whose time it takes."""
    config = service_of(Flags(engine="emulated", cluster=cluster(), replan=GOOD))
    assert config.replan.cluster == config.cluster
    assert (config.replan.slo, config.replan.attainment) == (Slo(ttft_s=1.0, tpot_s=0.05), 0.9)
    assert service_of(Flags(engine="emulated", cluster=cluster())).replan is None


def test_a_real_service_is_planned_by_the_profile_of_its_host(model, host):
    """So many workers on it, with the memory that they have; roles can be changed without asking for it."""
    workers = plan_workers(
        prefill=2,
        decode=1,
        colocated=0,
        chunked_prefill=True,
        max_num_batched_tokens=None,
        pin_cores=False,
        roles_move=True,
    )
    config = ServiceConfig(
        engine=EngineConfig(model=str(model)),
        workers=workers,
        run_dir="",
        router="jsq-planned",
        handoff="layer-wise",
    )
    spec = replan_config(config, ReplanFlags(slo="ttft=1", profile=host)).cluster
    assert [(pool.machines, pool.role.value, pool.machine) for pool in spec.pools] == [
        (2, "prefill", "host"),
        (1, "decode", "host"),
    ]
    assert spec.profile == str(host)


def test_roles_can_be_changed_where_they_are_planned(model, host):
    """Without --router."""
    flags = Flags(model=str(model), replan=ReplanFlags(slo="ttft=1", profile=host))
    assert service_of(flags).router == "jsq-planned"


@pytest.mark.parametrize(
    ("router", "replan", "says"),
    [
        ("jsq-planned", ReplanFlags(), "--replan needs an SLO"),
        ("jsq-planned", ReplanFlags(slo="ttft=1", attainment=1.5), "--attainment 1.5 is no share"),
        ("jsq-planned", ReplanFlags(slo="ttft=1", profile=Path("h.yaml")), "--profile is not for --cluster"),
        ("jsq", GOOD, "never moves an instance"),
    ],
)
def test_mistakes_are_one_sentence(cluster, router, replan, says):
    """Before anything is started."""
    with pytest.raises(ConfigurationError, match=says):
        service_of(Flags(engine="emulated", cluster=cluster(router), replan=replan))


def test_nothing_to_search_by(model, tmp_path):
    """A real model needs a profile, and one of its own."""
    with pytest.raises(ConfigurationError, match="needs to know how fast workers are"):
        service_of(Flags(model=str(model), replan=GOOD))
    other = tmp_path / "other.yaml"
    other.write_text(dump_host_profile(profile()))
    with pytest.raises(ConfigurationError, match="is a profile of small"):
        service_of(Flags(model=str(model), replan=ReplanFlags(slo="ttft=1", profile=other)))
