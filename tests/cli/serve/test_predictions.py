"""Tests of the flags of `twofold serve` for overload control, re-planning and forecasts."""

from pathlib import Path

import pytest

from support.hosts import TIMES, profile
from twofold.cli.serve.config import service_config
from twofold.cli.serve.settings import ServeSettings
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.performance.profile import dump_profile
from twofold.scheduling.routers import FORECASTING_ROUTERS
from twofold.security.key import write_key
from twofold.serving.config import ForecastConfig
from twofold.slo import Slo

CLUSTER = """
model: llama2-70b
router: {router}
pools:
  - {{machines: 2, machine: h100, role: prefill}}
  - {{machines: 1, machine: h100, role: decode}}
"""
BOTH = Slo(ttft_s=1.0, tpot_s=0.05)
TTFT = Slo(ttft_s=1.0)
NO_PROFILE = "needs --profile FILE"


@pytest.fixture
def cluster(tmp_path):
    def written(router="jsq"):
        path = tmp_path / "cluster.yaml"
        path.write_text(CLUSTER.format(router=router))
        return path

    return written


def emulated(cluster, **flags):
    return service_config(ServeSettings(engine="emulated", cluster=cluster, **flags))


def served(model, **flags):
    return service_config(ServeSettings(model=str(model), **flags))


def rejected(reason, make, *args, **flags):
    with pytest.raises(ConfigurationError, match=reason):
        make(*args, **flags)


def test_overload_of_an_emulated_service_uses_its_cluster(cluster):
    config = emulated(cluster(), overload="predicted", slo=BOTH)
    assert config.overload.cluster == config.cluster
    assert (config.overload.rule, config.overload.slo) == ("predicted", BOTH)
    assert emulated(cluster()).overload is None


def test_overload_of_a_real_service_uses_the_profile(model, host):
    spec = served(model, prefill=2, decode=1, overload="predicted", slo=BOTH, profile=host).overload.cluster
    assert [(pool.machines, pool.role) for pool in spec.pools] == [(2, Role.PREFILL), (1, Role.DECODE)]
    assert spec.profiles == (str(host),)


@pytest.mark.parametrize(
    ("router", "slo", "reason"),
    [
        ("jsq", None, "give --slo"),
        ("jsq", TTFT, "needs both bounds"),
        ("round-robin", BOTH, "--router round-robin places it elsewhere"),
        ("splitwise", BOTH, "a router with fixed roles"),
    ],
)
def test_rejects_overload_that_cannot_be_predicted(cluster, router, slo, reason):
    rejected(reason, emulated, cluster(router), overload="predicted", slo=slo)


def test_rejects_overload_without_a_profile(model):
    rejected(f"--overload {NO_PROFILE}", served, model, overload="predicted", slo=BOTH)


def test_rejects_overload_of_a_colocated_service(model, host):
    rejected("does not support mixed pools", served, model, colocated=1, overload="predicted", slo=BOTH, profile=host)


def test_replan_of_an_emulated_service_uses_its_cluster(cluster):
    config = emulated(cluster("jsq-planned"), replan=True, slo=BOTH)
    assert config.replan.cluster == config.cluster
    assert (config.replan.slo, config.replan.attainment) == (BOTH, 0.9)
    assert emulated(cluster("jsq-planned")).replan is None


def test_replan_of_a_real_service_uses_the_profile(model, host):
    config = served(model, prefill=2, decode=1, replan=True, slo=TTFT, profile=host)
    spec = config.replan.cluster
    assert config.router == "jsq-planned"
    assert [(pool.machines, pool.role.value, pool.machine) for pool in spec.pools] == [
        (2, "prefill", "host"),
        (1, "decode", "host"),
    ]
    assert spec.profiles == (str(host),)


@pytest.mark.parametrize(
    ("router", "flags", "reason"),
    [
        ("jsq-planned", {}, "--replan needs --slo"),
        ("jsq-planned", {"slo": TTFT, "profile": Path("h.yaml")}, "--profile excludes --cluster"),
        ("jsq", {"slo": BOTH}, "never moves an instance"),
    ],
)
def test_rejects_replanning_that_cannot_work(cluster, router, flags, reason):
    rejected(reason, emulated, cluster(router), replan=True, **flags)


@pytest.mark.parametrize("flag", ["--attainment", "--min-between"])
def test_rejects_flags_of_replanning_without_it(flag, refused, model):
    assert f"{flag} needs --replan" in refused("serve", model, flag, "1")


def test_rejects_an_attainment_that_is_no_share(refused, model):
    assert "--attainment 1.5 is out of range" in refused(
        "serve", model, "--replan", "--slo", "ttft=1", "--attainment", "1.5"
    )


def test_rejects_replanning_without_a_profile_of_the_model(model, tmp_path):
    rejected(NO_PROFILE, served, model, replan=True, slo=BOTH)
    other = tmp_path / "other.yaml"
    other.write_text(dump_profile(profile()))
    rejected("is a profile of small", served, model, replan=True, slo=TTFT, profile=other)


@pytest.mark.parametrize("router", FORECASTING_ROUTERS)
def test_prefill_workers_measure_themselves_for_a_router_that_predicts(router, model):
    config = served(model, router=router)
    assert (config.router, config.forecast) == (router, ForecastConfig())


def test_a_router_that_predicts_uses_the_profile(model, host):
    spec = served(model, prefill=2, router="conductor", profile=host).forecast.cluster
    assert [(pool.machines, pool.role) for pool in spec.pools] == [(2, Role.PREFILL), (1, Role.DECODE)]
    assert spec.profiles == (str(host),)
    assert served(model, colocated=2, router="load", profile=host).forecast is not None


def test_a_router_that_predicts_uses_the_emulated_cluster(cluster):
    config = emulated(cluster("conductor"), enable_prefix_caching=True)
    assert config.forecast.cluster == config.cluster


def test_other_routers_need_no_predictions(model):
    assert served(model).forecast is None


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"colocated": 2}, "--router conductor of a colocated service needs --profile"),
        ({"enable_prefix_caching": False}, "--router conductor needs --enable-prefix-caching"),
        ({"router": "jsq", "profile": True}, "or a router that predicts"),
    ],
)
def test_rejects_routers_without_predictions(model, host, flags, reason):
    given = {"router": "conductor", **flags, **({"profile": host} if "profile" in flags else {})}
    rejected(reason, served, model, **given)


def test_rejects_journals_of_routers_that_predict(model, tmp_path):
    rejected("leave out --journal", served, model, router="load", journal=tmp_path)


def test_rejects_prefix_routers_of_an_emulated_service_without_prefix_cache(cluster):
    rejected("--enable-prefix-caching", emulated, cluster("conductor"))


def test_rejects_a_profile_of_a_host_without_workers(model, host, tmp_path):
    write_key(tmp_path / "key")
    network = {"listen_workers": "tcp://127.0.0.1:7600", "cluster_key": tmp_path / "key"}
    flags = {"prefill": 0, "decode": 0, **network}
    assert served(model, router="conductor", **flags).forecast == ForecastConfig()
    rejected("which has no workers", served, model, router="load", profile=host, **flags)


def test_inline_prompts_use_the_times_of_the_profile(model, host):
    flags = {"inline_tbt": 0.1, "profile": host}
    config = served(model, colocated=1, **flags)
    assert {worker.batcher for worker in config.workers} == {"inlined"}
    assert (config.inline.times, config.inline.tbt_s) == (TIMES, 0.1)
    assert served(model, colocated=2, **flags).inline.times == TIMES.slower(1.0, 1.0)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"colocated": None}, "give --colocated N"),
        ({"profile": None}, f"--inline-tbt {NO_PROFILE}"),
        ({"tp": 2}, "leave out --tp and --pp"),
        ({"swap_space": 1 << 20}, "--swap-space excludes --inline-tbt"),
        ({"journal": Path("journal")}, "--journal excludes --inline-tbt"),
        ({"enable_chunked_prefill": True}, "--enable-chunked-prefill excludes --inline-tbt"),
    ],
)
def test_rejects_flags_that_exclude_inline_prompts(model, host, tmp_path, monkeypatch, changed, reason):
    monkeypatch.chdir(tmp_path)
    rejected(reason, served, model, **({"colocated": 1, "inline_tbt": 0.1, "profile": host} | changed))
