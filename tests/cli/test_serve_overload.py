"""`twofold serve --overload`: what it takes, and what it refuses in one sentence."""

import pytest

from twofold.cli.serve.config import service_of
from twofold.cli.serve_flags import Flags
from twofold.cli.serve.predictions import OverloadFlags
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.slo import Slo

CLUSTER = """
model: llama2-70b
router: {router}
pools:
  - {{machines: 2, machine: h100, role: prefill}}
  - {{machines: 1, machine: h100, role: decode}}
"""
GOOD = OverloadFlags(rule="predicted", slo="ttft=1,tpot=0.05")


@pytest.fixture
def cluster(tmp_path):
    def written(router="jsq"):
        path = tmp_path / "cluster.yaml"
        path.write_text(CLUSTER.format(router=router))
        return path

    return written


def test_an_emulated_service_is_judged_by_its_own_cluster(cluster):
    """The machines whose time it takes."""
    config = service_of(Flags(engine="emulated", cluster=cluster(), overload=GOOD))
    assert config.overload.cluster == config.cluster
    assert (config.overload.rule, config.overload.slo) == ("predicted", Slo(ttft_s=1.0, tpot_s=0.05))
    assert service_of(Flags(engine="emulated", cluster=cluster())).overload is None


def test_a_real_service_is_judged_by_the_profile_of_its_host(model, host):
    """So many workers on it."""
    flags = Flags(model=str(model), prefill=2, decode=1, overload=replace_flags(profile=host))
    spec = service_of(flags).overload.cluster
    assert [(pool.machines, pool.role) for pool in spec.pools] == [(2, Role.PREFILL), (1, Role.DECODE)]
    assert spec.profile == str(host)


def replace_flags(**changed):
    given = {"rule": GOOD.rule, "slo": GOOD.slo, "profile": GOOD.profile}
    return OverloadFlags(**(given | changed))


@pytest.mark.parametrize(
    ("router", "changed", "reason"),
    [
        ("jsq", {"slo": None}, "give --slo"),
        ("jsq", {"slo": "ttft=1"}, "needs both bounds"),
        ("jsq", {"rule": "late"}, "unknown overload rule 'late'"),
        ("round-robin", {}, "leave out --router round-robin"),
        ("splitwise", {}, "fixed roles, not splitwise"),
    ],
)
def test_what_cannot_be_is_refused(cluster, router, changed, reason):
    """In a sentence that says what would be right."""
    with pytest.raises(ConfigurationError, match=reason):
        service_of(Flags(engine="emulated", cluster=cluster(router), overload=replace_flags(**changed)))


def test_a_real_service_without_a_profile_is_refused(model):
    """Nobody knows how fast it is."""
    with pytest.raises(ConfigurationError, match="--overload needs to know how fast workers are"):
        service_of(Flags(model=str(model), overload=GOOD))


def test_a_colocated_service_is_refused(model, host):
    """Its phases are in each other's way, which no prediction here knows of."""
    with pytest.raises(ConfigurationError, match="not support mixed pools"):
        service_of(Flags(model=str(model), colocated=1, overload=replace_flags(profile=host)))
