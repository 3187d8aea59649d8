"""Simulation of the `inlined` batcher, which adds prompts to decode batches within a TBT bound."""

import msgspec
import pytest

from support.toy import CATALOG
from twofold.cluster.profiles import instance_profiles
from twofold.cluster.spec import ClusterSpec, PoolSpec
from twofold.errors import ConfigurationError
from twofold.instance import Role
from twofold.request import Request
from twofold.serving.launch.worker_plan import check_servable
from twofold.simulation.simulate import simulate

BOUND_S = 0.06
MIXED = PoolSpec(machines=1, machine="dgx-h100", role=Role.MIXED)
SPEC = ClusterSpec(
    pools=(msgspec.structs.replace(MIXED, batcher="inlined"),), model="llama2-70b", router="jsq", inline_tbt_s=BOUND_S
)


def requests():
    """Yield chat requests, of which a few have very long prompts."""
    for number in range(60):
        prompt = 3500 if number % 20 == 10 else 200
        yield Request(id=str(number), arrival_s=number / 10, prompt_tokens=prompt, output_tokens=60)


def test_token_gaps_stay_within_the_bound():
    """The batcher named `inlined` keeps every token gap within the TBT bound; the batcher named `mixed` does not."""
    mixed = msgspec.structs.replace(SPEC, pools=(MIXED,), inline_tbt_s=None)
    inlined, baseline = (simulate(spec, requests(), catalog=CATALOG) for spec in (SPEC, mixed))
    assert inlined.completed == baseline.completed == 60
    assert inlined.itl_s.percentile(100) <= BOUND_S * 1.001 < baseline.itl_s.percentile(100)


def test_rejects_the_batcher_without_its_bound():
    """The `inlined` batcher needs `inline_tbt_s`, and other batchers reject it."""
    for changes in ({"inline_tbt_s": None}, {"pools": (MIXED,)}):
        with pytest.raises(ConfigurationError, match="give both or neither"):
            instance_profiles(msgspec.structs.replace(SPEC, **changes), CATALOG)


def test_a_service_rejects_the_inlined_batcher_of_a_cluster_file():
    with pytest.raises(ConfigurationError, match="an emulated service cannot inline prompts"):
        check_servable(SPEC)
