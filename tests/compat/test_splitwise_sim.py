"""The batcher `splitwise-sim` follows the rules of SplitwiseSim's instance scheduler."""

import pytest

from support.scheduled import arrive, ran, request, scheduler
from support.selecting import decoding, ready, selected, waiting
from twofold.compat.splitwise_sim import SplitwiseSimBatcher


def sim(**more):
    return scheduler("splitwise-sim", **{"num_blocks": 5000, "block_size": 16} | more)


def running_decodes(count=3, **more):
    """Return an instance that has started a batch of `count` decodes."""
    made = sim(**more)
    for number in range(count):
        arrive(made, request(f"d{number}", output=500))
    assert made.changed
    assert made.start(0.0).limit == 499
    assert not made.changed
    return made


def test_orders_prompts_then_running_then_ready_tasks():
    chosen = selected(SplitwiseSimBatcher(100, 64), waiting(60, 37), decoding(2), ready(3))
    assert chosen.prefills == [("w0", 60), ("w1", 37)]
    assert (chosen.resume, chosen.pause) == (["r0"], [])


def test_a_prompt_over_the_budget_runs_alone():
    chosen = selected(SplitwiseSimBatcher(100, 64), waiting(500, 1), decoding(2), ready(1))
    assert (chosen.prefills, chosen.resume, chosen.pause) == ([("w0", 500)], [], ["d0", "d1"])


def test_limits_the_sequences_of_a_batch():
    chosen = selected(SplitwiseSimBatcher(2048, 4), waiting(10, 10), decoding(3), ready(2))
    assert (len(chosen.prefills), chosen.resume, chosen.pause) == (2, [], ["d2"])


def paused_by_prompts(arrival_s):
    """Return an instance with one decode and eight queued prompts, each as long as the token budget."""
    made = sim(budget=10)
    arrive(made, request("a", output=50, arrival_s=arrival_s))
    assert ran(made) == ["a"]
    for number in range(8):
        made.submit(request(f"p{number}", prompt=10, arrival_s=1.0), decodes_here=False)
    return made


def test_decode_left_out_four_times_goes_first():
    made = paused_by_prompts(arrival_s=0.0)
    assert [ran(made) for _ in range(5)] == [["p0"], ["p1"], ["p2"], ["p3"], ["a"]]
    assert made.preemptions == 1


def test_overdue_tasks_of_equal_age_go_by_arrival():
    made = paused_by_prompts(arrival_s=2.0)
    assert [ran(made) for _ in range(8)] == [[f"p{number}"] for number in range(8)]
    assert ran(made) == ["a"]


def test_age_order_is_fixed_when_a_task_is_added():
    made = sim(num_blocks=8, budget=100)
    arrive(made, request("a", prompt=16, output=17))  # two of eight blocks
    ran(made)
    made.submit(request("big", prompt=112, output=1, arrival_s=1.0), decodes_here=True)  # seven
    made.submit(request("small", prompt=16, output=1, arrival_s=2.0), decodes_here=False)
    for _ in range(8):
        assert ran(made) == ["a"], "`small` is overdue too, but the decode of `big`, which never ages, is before it"


@pytest.mark.parametrize("decodes_here", [False, True])
def test_prompt_within_the_budget_interrupts_decodes(decodes_here):
    made = running_decodes()
    made.submit(request("p", prompt=2048), decodes_here=decodes_here)
    assert made.changed
    made.advance(1)
    assert ran(made) == ["p"]
    assert made.preemptions == 3


def test_prompt_over_the_budget_does_not_interrupt_decodes():
    """A prompt longer than the token budget waits until a running decode ends."""
    made = running_decodes()
    made.submit(request("p", prompt=2049), decodes_here=False)
    assert not made.changed
    made.advance(100)
    assert made.start(0.0).limit == 399, "the selection stands"
    made.advance(399)
    assert ran(made) == ["p"]


def test_chained_decode_of_a_long_prompt_interrupts_decodes():
    made = running_decodes()
    made.submit(request("p", prompt=2049), decodes_here=True)
    assert made.changed
    made.advance(1)
    assert ran(made) == ["p"]


def test_decode_does_not_interrupt_a_full_batch():
    made = running_decodes(count=4, max_num_seqs=4)
    arrive(made, request("d", output=5))
    assert not made.changed


def test_running_prompt_is_not_interrupted():
    made = sim()
    made.submit(request("p", prompt=100), decodes_here=False)
    assert made.start(0.0).limit == 1
    made.submit(request("q", prompt=100), decodes_here=False)
    arrive(made, request("d"))
    assert not made.changed


def test_idle_instance_without_blocks_waits_for_freed_blocks():
    made = sim(num_blocks=8)
    made.submit(request("p", prompt=112), decodes_here=False)
    assert ran(made) == ["p"]
    assert made.next_batch(0.0) is None
    made.submit(request("q", prompt=32), decodes_here=False)
    assert not made.changed, "it does not fit"
    made.handed_off("p")
    assert made.changed
    assert ran(made) == ["q"]


def test_freed_blocks_interrupt_decodes_only_below_the_sequence_limit():
    for max_num_seqs, ends in ((4, False), (5, True)):
        made = sim(max_num_seqs=max_num_seqs)
        made.submit(request("p", prompt=112), decodes_here=False)
        ran(made)
        for number in range(4):
            arrive(made, request(f"d{number}", output=500))
        made.start(0.0)
        made.submit(request("long", prompt=3000), decodes_here=False)
        assert not made.changed
        made.handed_off("p")
        assert made.changed is ends
