"""Durations of iterations, in picoseconds."""

from hypothesis import given
from hypothesis import strategies as st

from support.scheduled import request
from support.toy import ToyModel
from twofold.cluster.timing import PS, RunTiming, Timing
from twofold.scheduling.instance.queues import RunningBatch, SchedulerOutput
from twofold.scheduling.instance.sequence import ScheduledSequence

paces = st.builds(RunTiming, st.integers(1, 10**11), st.integers(0, 10**9) | st.just(0), st.just(1000))


@given(paces, st.integers(0, 3000))
def test_end_of_a_run_is_the_sum_of_its_iterations(pace, count):
    assert pace.end_ps(count) == sum(pace.first_ps + pace.step_ps * i for i in range(count))


@given(paces, st.integers(1, 5000), st.integers(-1, 1))
def test_finds_the_iteration_under_way(pace, count, off):
    elapsed = max(0, pace.end_ps(count) + off)
    running = pace.under_way(elapsed)
    assert pace.end_ps(running - 1) <= elapsed < pace.end_ps(running)


@given(paces, st.integers(0, 10**17))
def test_finds_the_iteration_at_any_time(pace, elapsed):
    running = pace.under_way(elapsed)
    assert pace.end_ps(running - 1) <= elapsed < pace.end_ps(running)


@given(st.integers(1, 100), st.integers(1, 10**6), st.integers(1, 500))
def test_iteration_of_a_run_takes_as_long_as_alone(sequences, context, later):
    timing = Timing(ToyModel(4, 1, 7))
    first = timing.batch(RunningBatch(SchedulerOutput(), sequences, context, 10**6))
    alone = timing.batch(RunningBatch(SchedulerOutput(), sequences, context + later * sequences, 10**6))
    assert alone.first_ps == first.first_ps + later * first.step_ps


def test_prompt_timing_includes_context_and_decodes():
    asked = []

    class Asked(ToyModel):
        def prefill_s(self, tokens, squares):
            asked.append((tokens, squares))
            return 1.0

        def mixed_s(self, tokens, squares, sequences, context):
            asked.append((tokens, squares, sequences, context))
            return 2.0

    chunk = ScheduledSequence(request("a", prompt=100), True, computed=90).prefill(10)
    timing = Timing(Asked())
    assert timing.batch(RunningBatch(SchedulerOutput([chunk]), 0, 0, 1)).first_ps == PS
    assert timing.batch(RunningBatch(SchedulerOutput([chunk]), 3, 700, 1)).first_ps == 2 * PS
    assert asked == [(10, 100**2 - 90**2), (10, 100**2 - 90**2, 3, 700)]
