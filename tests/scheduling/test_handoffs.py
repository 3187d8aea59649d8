"""How the KV cache of a request is to be sent."""

from hypothesis import given
from hypothesis import strategies as st

from support.scheduled import request
from twofold.handoff import HandoffMode
from twofold.scheduling.handoffs import HANDOFF_POLICIES, BySize
from twofold.scheduling.router import Route

ROUTE = Route("p0", "d0")


@given(st.integers(1, 10_000), st.integers(0, 10_000))
def test_short_prompts_go_at_once_and_long_ones_by_layer(prompt, crossover):
    """Splitwise section 4.3: from the crossover on it pays to send while computing."""
    mode = BySize(lambda _: crossover).choose(request("a", prompt), ROUTE)
    assert mode is (HandoffMode.LAYER_WISE if prompt >= crossover else HandoffMode.SERIALIZED)


def test_the_crossover_is_that_of_the_prefill_instance():
    """It depends on how fast that one computes, and on its link."""
    policy = BySize({"p0": 512, "p1": 1024}.__getitem__)
    modes = [policy.choose(request("a", prompt=700), Route(name, "d0")) for name in ("p0", "p1")]
    assert modes == [HandoffMode.LAYER_WISE, HandoffMode.SERIALIZED]


def test_fixed_policies_do_not_look_at_the_request():
    """They need no crossover either."""

    def nobody_knows(instance):
        raise AssertionError(instance)

    for name, mode in (("serialized", HandoffMode.SERIALIZED), ("layer-wise", HandoffMode.LAYER_WISE)):
        policy = HANDOFF_POLICIES[name](nobody_knows)
        assert {policy.choose(request("a", prompt), ROUTE) for prompt in (1, 100_000)} == {mode}
