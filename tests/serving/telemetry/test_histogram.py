"""Histogram metrics that take many values at once."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from twofold.serving.telemetry.metrics import BulkHistogram

BUCKETS = (0.5, 1.0, 2.0)


@given(st.lists(st.lists(st.sampled_from((0.0, 0.5, 0.75, 1.0, 1.5, 2.0, 8.0)), max_size=8), max_size=4))
def test_many_values_at_once_give_the_text_of_prometheus(groups):
    bulk, single = CollectorRegistry(), CollectorRegistry()
    together = BulkHistogram("gap", "Gap.", BUCKETS)
    one_by_one = Histogram("gap", "Gap.", buckets=BUCKETS, registry=single)
    bulk.register(together)
    for group in groups:
        together.observe(group)
        for value in group:
            one_by_one.observe(value)
    expected = [line for line in generate_latest(single).decode().splitlines() if "_created" not in line]
    assert generate_latest(bulk).decode().splitlines() == expected
