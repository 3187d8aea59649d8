"""Runs of iterations taken at once give exactly what iterations taken one by one give."""

from hypothesis import given, settings

from support.toy import clusters, run, workloads


@settings(max_examples=1500)
@given(clusters(), workloads())
def test_runs_taken_at_once_equal_single_iterations(cluster, requests):
    """Every moment of every request, every histogram bucket, energy and count: to the picosecond."""
    at_once = run(cluster, requests)
    one_by_one = run(cluster, requests, max_run=1)
    assert at_once.facts() == one_by_one.facts()


@settings(max_examples=300)
@given(clusters(), workloads())
def test_any_limit_on_the_length_of_a_run_changes_nothing(cluster, requests):
    """Nor does a limit in between."""
    assert run(cluster, requests).facts() == run(cluster, requests, max_run=3).facts()
