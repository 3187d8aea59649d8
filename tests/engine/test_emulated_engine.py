"""The emulated engine runs on a fake clock, which advances only when the engine sleeps or a test advances it."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fake_clock import FakeClock
from support.scheduled import request
from support.toy import ToyModel
from twofold.cluster.timing import PS, Timing
from twofold.engine.base import SequenceStep
from twofold.engine.emulated import EmulatedEngine, LayerGroups, PrefillTimes, RandomTokens
from twofold.request import SamplingParams
from twofold.scheduling.instance.queues import RunningBatch, SchedulerOutput
from twofold.scheduling.instance.sequence import ScheduledSequence

MODEL = ToyModel(4, 1, 7)
MS = PS // 1000
SAMPLING = SamplingParams(max_tokens=100, seed=5)


def engine(clock, layers=10):
    groups = LayerGroups(layers)
    prefills = PrefillTimes(groups)
    layout = groups.layout(1000, 16)
    return EmulatedEngine(Timing(MODEL), layout, 100, prefills, RandomTokens(1000), clock, "prefill-0")


def prompt(tokens, start=0, name="a", sampling=SAMPLING):
    return SequenceStep(name, [7] * tokens, start, (3, 4), sampling)


def decode(context, name="b", output_index=1, sampling=SAMPLING):
    return SequenceStep(name, [7], context, (5, 6), sampling, output_index)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), max_size=3), st.lists(st.integers(1, 500), max_size=4)
)
def test_iterations_take_the_time_of_the_simulator(prompts, contexts):
    parts = [
        ScheduledSequence(request(str(i), prompt=tokens + start), True, computed=start).prefill(tokens)
        for i, (tokens, start) in enumerate(prompts)
    ]
    if not parts and not contexts:
        return
    iteration = RunningBatch(SchedulerOutput(parts), len(contexts), sum(contexts), 1)
    clock = FakeClock()
    steps = [prompt(tokens, start) for tokens, start in prompts] + [decode(context) for context in contexts]
    engine(clock).run(steps)
    assert clock.now() == Timing(MODEL).batch(iteration).first_ps


def test_iterations_do_not_drift():
    """Consecutive iterations end on schedule, in spite of late wake-ups and of time spent between iterations."""
    clock = FakeClock(oversleep=MS)
    emulated = engine(clock)
    for index in range(1, 101):
        emulated.run([decode(50, output_index=index)])
        clock.pass_time(2 * MS)
    one = Timing(MODEL).decodes(1, 50).first_ps
    assert clock.slept_until == [one * index for index in range(1, 101)]


def test_an_iteration_after_a_pause_starts_at_once():
    clock = FakeClock()
    emulated = engine(clock)
    emulated.run([decode(50)])
    emulated.pause()
    clock.pass_time(20 * MS)
    began = clock.now()
    emulated.run([decode(50)])
    assert clock.now() - began == Timing(MODEL).decodes(1, 50).first_ps


def test_a_stopped_process_skips_the_lost_time():
    """If the process was stopped for seconds, the engine does not run faster afterwards to catch up."""
    clock = FakeClock()
    emulated = engine(clock)
    emulated.run([decode(50)])
    clock.pass_time(5 * PS)
    began = clock.now()
    emulated.run([decode(50)])
    assert clock.now() > began


def test_layers_are_ready_at_equal_intervals():
    clock = FakeClock()
    told = []
    emulated = engine(clock, layers=10)
    emulated.run([prompt(96)], lambda group: told.append((group, clock.now())))
    groups = LayerGroups(10)
    duration = 100 * MS
    assert told == [(k, duration * end // 10) for k, end in enumerate(groups.ends)]
    assert clock.now() == duration


def test_an_empty_iteration_takes_no_time():
    clock = FakeClock()
    assert engine(clock).run([]) == []
    assert clock.now() == 0


def test_tokens_depend_on_seed_and_position_alone():
    alone = engine(FakeClock()).run([decode(50)])
    among = engine(FakeClock()).run([prompt(20), decode(50, name="other"), decode(9)])
    assert alone[0] == among[1]
    replayed = engine(FakeClock()).run([prompt(51)])  # the same position, reached by prefill
    assert replayed == alone


def test_an_incomplete_prompt_samples_no_token():
    assert engine(FakeClock()).run([prompt(20, sampling=None), decode(9)])[0] is None


def test_warns_about_late_batches(caplog):
    """The engine logs how late a batch ended, but at most once in ten seconds."""
    emulated = engine(FakeClock(oversleep=80 * MS))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            emulated.run([decode(50)])
    (record,) = caplog.records
    assert "prefill-0 ended a batch 80 ms late" in record.getMessage()


@pytest.mark.parametrize("sampling", [SAMPLING, SamplingParams(max_tokens=1, temperature=0.0)])
def test_greedy_output_does_not_depend_on_the_seed(sampling):
    other = SamplingParams(max_tokens=1, temperature=sampling.temperature, seed=99)
    run = engine(FakeClock()).run
    same = run([decode(50, sampling=sampling)]) == run([decode(50, sampling=other)])
    assert same == sampling.greedy
