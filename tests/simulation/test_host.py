"""Sharing of a simulated host's CPU cores among tasks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twofold.cluster.timing import PS
from twofold.performance.profile import ContentionFactors
from twofold.simulation.kernel import Event, EventOrder, Host, HostTask, Kernel


class Done(Event):
    """Event that records the end time of a job in seconds."""

    def __init__(self, run, number):
        self.order = EventOrder.COMPLETION + number
        self.run, self.number = run, number

    def happen(self):
        self.run.ends[self.number] = self.run.kernel.now / PS


class Run:
    """A simulated host that runs jobs with given start times."""

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


def test_single_task_runs_at_full_speed():
    run = Run(cores=2)
    run.job(0, HostTask([0]), 1.0, 2.0)
    assert run.finish() == {0: 3.0}


def test_two_tasks_share_a_core():
    """Two tasks on one core run at half speed while both run."""
    run = Run(cores=2)
    run.job(0, HostTask([0]), 0.0, 3.0)
    run.job(1, HostTask([0]), 1.0, 1.0)
    assert run.finish() == pytest.approx({0: 4.0, 1: 3.0})


def test_unpinned_task_runs_on_a_free_core():
    run = Run(cores=2)
    run.job(0, HostTask([0]), 0.0, 2.0)
    run.job(1, HostTask([0, 1]), 0.0, 2.0)
    assert run.finish() == pytest.approx({0: 2.0, 1: 2.0})


def test_busy_neighbours_slow_a_sensitive_task_down():
    """A task with a contention factor is slowed down while another core is busy."""
    run = Run(cores=2)
    run.job(0, HostTask([0], contention=ContentionFactors(crowded=1.5)), 0.0, 3.0)
    run.job(1, HostTask([1]), 0.0, 1.5)
    assert run.finish() == pytest.approx({0: 3.5, 1: 1.5})


def test_threads_run_on_separate_cores():
    """The speed of a task with two threads depends on the load of both cores."""
    run = Run(cores=2)
    run.job(0, HostTask([0, 1], threads=2), 0.0, 3.0)
    run.job(1, HostTask([1]), 0.0, 1.0)
    assert run.finish() == pytest.approx({0: 3.5, 1: 2.0})


def test_dropped_task_does_not_end():
    run = Run(cores=1)
    lost = HostTask([0])
    run.job(0, lost, 0.0, 5.0)
    run.job(1, HostTask([0]), 0.0, 2.0)
    run.kernel.schedule(PS, EventOrder.FAILURE, lambda _: run.host.drop(lost))
    assert run.finish() == pytest.approx({1: 2.5})


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.floats(0.001, 5), st.sampled_from([(0,), (1,), (0, 1)])), min_size=1, max_size=8
    )
)
def test_cores_are_never_oversubscribed(jobs):
    run = Run(cores=2)
    for number, (start, work, cores) in enumerate(jobs):
        run.job(number, HostTask(cores), start, work)
    ends = run.finish()
    assert set(ends) == set(range(len(jobs)))
    assert all(ends[n] >= (start + work) * (1 - 1e-9) for n, (start, work, _) in enumerate(jobs))
    first = min(start for start, _, _ in jobs)
    assert 2 * (max(ends.values()) - first) >= sum(work for _, work, _ in jobs) * (1 - 1e-9)
