"""Tasks on the cores of a host: equal shares of a core, and no work is lost or done twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.cluster.timing import PS
from twofold.performance.host_profile import ContentionFactors
from twofold.simulation.host import Host, HostTask
from twofold.simulation.kernel import Event, EventOrder, Kernel


class Done(Event):
    """Notes when it happens, in seconds."""

    def __init__(self, run, number):
        self.order = EventOrder.COMPLETION + number
        self.run, self.number = run, number

    def happen(self):
        self.run.ends[self.number] = self.run.kernel.now / PS


class Run:
    """A host, and jobs (start, seconds of work, task) on it."""

    def __init__(self, cores):
        self.kernel = Kernel()
        self.host = Host(self.kernel, cores)
        self.ends = {}

    def job(self, number, task, start_s, work_s):
        def begin(_):
            self.host.begin(task, round(work_s * PS), Done(self, number))

        self.kernel.schedule(round(start_s * PS), EventOrder.ARRIVAL + number, begin)

    def finish(self):
        self.kernel.run(until_events=10**9)
        return self.ends


def test_a_task_alone_takes_its_time():
    """Nobody is in the way."""
    run = Run(cores=2)
    run.job(0, HostTask([0]), 1.0, 2.0)
    assert run.finish() == {0: 3.0}


def test_two_on_a_core_take_turns():
    """Both run at half speed while both run: 1 s alone, then shared until the shorter has had its second second."""
    run = Run(cores=2)
    run.job(0, HostTask([0]), 0.0, 3.0)
    run.job(1, HostTask([0]), 1.0, 1.0)
    assert run.finish() == pytest.approx({0: 4.0, 1: 3.0})


def test_who_may_run_anywhere_runs_where_nobody_does():
    """And is in nobody's way then."""
    run = Run(cores=2)
    run.job(0, HostTask([0]), 0.0, 2.0)
    run.job(1, HostTask([0, 1]), 0.0, 2.0)
    assert run.finish() == pytest.approx({0: 2.0, 1: 2.0})


def test_busy_neighbours_slow_down():
    """Only while they are busy, and only who suffers from it."""
    run = Run(cores=2)
    run.job(0, HostTask([0], contention=ContentionFactors(crowded=1.5)), 0.0, 3.0)
    run.job(1, HostTask([1]), 0.0, 1.5)
    assert run.finish() == pytest.approx({0: 3.5, 1: 1.5})


def test_threads_take_a_core_each():
    """A task of two threads has the mean of what it gets of its cores."""
    run = Run(cores=2)
    run.job(0, HostTask([0, 1], threads=2), 0.0, 3.0)
    run.job(1, HostTask([1]), 0.0, 1.0)
    assert run.finish() == pytest.approx({0: 3.5, 1: 2.0})


def test_what_is_dropped_does_not_end():
    """And gives its share back."""
    run = Run(cores=1)
    lost = HostTask([0])
    run.job(0, lost, 0.0, 5.0)
    run.job(1, HostTask([0]), 0.0, 2.0)
    run.kernel.schedule(PS, EventOrder.FAILURE, lambda _: run.host.drop(lost))
    assert run.finish() == pytest.approx({1: 2.5})


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0.001, 5), st.sampled_from([(0,), (1,), (0, 1)])),
        min_size=1,
        max_size=8,
    )
)
def test_no_core_does_more_than_a_core_can(jobs):
    """All end, none before it could alone, and the host does no more work than its cores have time for."""
    run = Run(cores=2)
    for number, (start, work, cores) in enumerate(jobs):
        run.job(number, HostTask(cores), start, work)
    ends = run.finish()
    assert set(ends) == set(range(len(jobs)))
    assert all(ends[n] >= (start + work) * (1 - 1e-9) for n, (start, work, _) in enumerate(jobs))
    first = min(start for start, _, _ in jobs)
    assert 2 * (max(ends.values()) - first) >= sum(work for _, work, _ in jobs) * (1 - 1e-9)
