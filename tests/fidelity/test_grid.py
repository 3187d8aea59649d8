"""The groups of requests that a calibration sends to the service."""

import pytest

from twofold.fidelity.measurement import Purpose, mixed_groups, shared_groups, split_groups


@pytest.mark.parametrize(("context", "seqs"), [(512, 4), (4096, 64), (131_072, 256)])
def test_requests_fit_the_service(context, seqs):
    """Each request fits in the context, requests that decode together fit in one batch, and request ids are unique."""
    groups = [*split_groups(context, seqs), *mixed_groups(context), *shared_groups(context)]
    requests = [request for group in groups for request in group.requests]
    assert all(request.prompt_tokens + request.output_tokens <= context for request in requests)
    assert all(len(group.requests) <= seqs for group in groups if group.purpose is Purpose.DECODES)
    assert len({request.id for request in requests}) == len(requests)
    assert {group.purpose for group in groups} == set(Purpose)


def test_arrivals_are_in_order():
    for group in [*split_groups(4096, 64), *mixed_groups(4096), *shared_groups(4096)]:
        arrivals = [request.arrival_s for request in group.requests]
        assert arrivals == sorted(arrivals)
