"""Simulating several equal iterations in one step changes no result."""

from hypothesis import given, settings

from support.toy import clusters, run, workloads


@settings(max_examples=1500)
@given(clusters(), workloads())
def test_runs_equal_single_iterations(cluster, requests):
    at_once = run(cluster, requests)
    one_by_one = run(cluster, requests, max_run=1)
    assert at_once.facts() == one_by_one.facts()


@settings(max_examples=300)
@given(clusters(), workloads())
def test_run_length_limits_do_not_change_results(cluster, requests):
    assert run(cluster, requests).facts() == run(cluster, requests, max_run=3).facts()
