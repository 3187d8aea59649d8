"""`twofold serve --router conductor`: what it predicts by, and what it refuses in one sentence."""

import pytest

from twofold.cli.serve.config import service_of
from twofold.cli.serve_flags import Flags
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.scheduling.routers import FORECASTING_ROUTERS
from twofold.security.key import write_key
from twofold.serving.config import ForecastConfig

CLUSTER = """
model: llama2-70b
router: {router}
pools:
  - {{machines: 2, machine: h100, role: prefill}}
  - {{machines: 1, machine: h100, role: decode}}
"""


def cluster(folder, router="conductor"):
    path = folder / "cluster.yaml"
    path.write_text(CLUSTER.format(router=router))
    return path


@pytest.mark.parametrize("router", FORECASTING_ROUTERS)
def test_workers_of_a_split_service_measure_themselves(router, model):
    """So it needs nothing; a profile says more."""
    config = service_of(Flags(model=str(model), router=router))
    assert (config.router, config.forecast) == (router, ForecastConfig())


def test_a_profile_says_how_fast_workers_are(model, host):
    """So many of them, in both phases."""
    spec = service_of(Flags(model=str(model), prefill=2, router="conductor", profile=host)).forecast.cluster
    assert [(pool.machines, pool.role) for pool in spec.pools] == [(2, Role.PREFILL), (1, Role.DECODE)]
    assert spec.profile == str(host)
    assert service_of(Flags(model=str(model), colocated=2, router="load", profile=host)).forecast is not None


def test_an_emulated_service_predicts_by_its_own_cluster(tmp_path):
    """The machines whose time it takes."""
    config = service_of(Flags(engine="emulated", cluster=cluster(tmp_path), prefix_caching=True))
    assert config.forecast.cluster == config.cluster


def test_others_predict_nothing(model):
    """Whatever is said to be as it is."""
    assert service_of(Flags(model=str(model))).forecast is None


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"colocated": 2}, "--router conductor of a colocated service needs to know how fast workers are"),
        ({"prefix_caching": False}, "looks for what --prefix-caching keeps"),
        (
            {"router": "jsq", "profile": True},
            "--inline-tbt and the routers load",
        ),
    ],
)
def test_what_cannot_be_is_refused(model, host, flags, reason):
    """In a sentence that says what would be right."""
    given = {"router": "conductor", **flags, **({"profile": host} if "profile" in flags else {})}
    with pytest.raises(ConfigurationError, match=reason):
        service_of(Flags(model=str(model), **given))


def test_decisions_by_predictions_are_not_in_journals(model, tmp_path):
    """They could not be taken again from those."""
    with pytest.raises(ConfigurationError, match="leave out --journal"):
        service_of(Flags(model=str(model), router="load", journal=tmp_path))


def test_an_emulated_service_keeps_nothing_unless_it_is_told(tmp_path):
    """As its simulation does."""
    with pytest.raises(ConfigurationError, match="--prefix-caching"):
        service_of(Flags(engine="emulated", cluster=cluster(tmp_path)))


def test_a_profile_of_a_host_without_workers_is_refused(model, host, tmp_path):
    """All of them are elsewhere."""
    write_key(tmp_path / "key")
    network = {"listen_workers": "tcp://127.0.0.1:7600", "cluster_key": tmp_path / "key"}
    flags = Flags(model=str(model), prefill=0, decode=0, router="conductor", **network)
    assert service_of(flags).forecast == ForecastConfig()
    with pytest.raises(ConfigurationError, match="which has no workers"):
        service_of(Flags(model=str(model), prefill=0, decode=0, router="load", profile=host, **network))
