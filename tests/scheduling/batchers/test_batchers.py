"""The sequences that each batcher selects for the next iteration."""

import pytest

from support.scheduled import arrive, ran, request, scheduler
from support.selecting import decoding, prefilling, ready, room, selected, waiting
from support.toy import ToyModel
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.batchers.mixed import InlinedPrefill

# Batchers of one phase.
ONLY_PREFILL, ONLY_DECODE = {"prefill", "prefill-balanced", "prefill-chunks"}, {"decode"}


def test_prefill_stops_at_its_token_budget():
    """A small prompt does not overtake a large prompt that exceeds the remaining budget."""
    prefill = BATCHERS["prefill"](2048, 64)
    assert selected(prefill, waiting(1000, 1000, 100, 10)).prefills == [("w0", 1000), ("w1", 1000)]


def test_a_prompt_over_the_budget_runs_alone():
    """A prompt over the token budget runs, but only alone (Splitwise, section 4.2)."""
    prefill = BATCHERS["prefill"](2048, 64)
    assert selected(prefill, waiting(5000, 10)).prefills == [("w0", 5000)]
    assert selected(prefill, waiting(10, 5000)).prefills == [("w0", 10)]


def test_large_prompt_is_not_starved_by_small_ones():
    prefill = BATCHERS["prefill"](2048, 64)
    assert selected(prefill, waiting(10, 1000, 10), room(blocks=5)).prefills == [("w0", 10)]


def test_balanced_prefill_makes_equal_iterations():
    """`prefill-balanced` divides queued prompts into equal batches."""
    eight = [300] * 8
    assert len(selected(BATCHERS["prefill"](2048, 64), waiting(*eight)).prefills) == 6
    balanced = BATCHERS["prefill-balanced"](2048, 64)
    assert len(selected(balanced, waiting(*eight)).prefills) == 4
    assert len(selected(balanced, waiting(*eight[:6])).prefills) == 6


def test_balanced_prefill_keeps_order_and_budget():
    balanced = BATCHERS["prefill-balanced"](2048, 64)
    assert selected(balanced, waiting(5000, 10)).prefills == [("w0", 5000)]
    assert selected(balanced, waiting(10, 5000, 10)).prefills == [("w0", 10)]
    assert selected(balanced, waiting(1500, 700, 10)).prefills == [("w0", 1500)]


def test_decode_runs_every_sequence_up_to_the_limit():
    """`decode` adds ready sequences in order of arrival, until `max_num_seqs` sequences run."""
    decode = BATCHERS["decode"](2048, 4)
    chosen = selected(decode, decoding(2), ready(5))
    assert (chosen.prefills, chosen.resume, chosen.pause) == ([], ["r0", "r1"], [])


def test_prefill_first_pauses_decodes():
    """With `prefill-first`, a waiting prompt pauses all decodes, which later resume in the same order."""
    first = BATCHERS["prefill-first"](2048, 64)
    chosen = selected(first, waiting(2000, 100), decoding(2), ready(1))
    assert (chosen.prefills, chosen.resume, chosen.pause) == ([("w0", 2000)], [], ["d0", "d1"])
    alone = scheduler("prefill-first", num_blocks=1000)
    for name in "ab":
        arrive(alone, request(name, output=50))
    assert ran(alone) == ["a", "b"]
    alone.submit(request("p", prompt=8), decodes_here=False)
    assert [ran(alone), ran(alone)] == [["p"], ["a", "b"]]


def test_decodes_are_limited_by_the_token_budget():
    for name in ("decode", "chunked-prefill", "splitwise", "splitwise-sim"):
        assert selected(BATCHERS[name](3, 64), ready(5)).resume == ["r0", "r1", "r2"], name


def test_mixed_runs_whole_prompts_beside_decodes():
    mixed = BATCHERS["mixed"](2048, 64)
    chosen = selected(mixed, waiting(1500), decoding(2), ready(1))
    assert (chosen.prefills, chosen.resume, chosen.pause) == ([("w0", 1500)], ["r0"], [])


def test_mixed_is_limited_by_sequences():
    """`mixed` selects decodes first, and prompts only for the remaining sequence slots."""
    chosen = selected(BATCHERS["mixed"](2048, 4), waiting(10, 10, 10), decoding(2), ready(1))
    assert (chosen.prefills, chosen.resume) == ([("w0", 10)], ["r0"])


@pytest.mark.parametrize("name", ["mixed", "chunked-prefill", "inlined"])
def test_hand_offs_without_a_pause_do_not_starve_a_prompt(name):
    """A prompt starts before later hand-offs, though decodes have all slots of its instance."""
    instance = scheduler(name, num_blocks=1000, max_num_seqs=4)
    for number in range(4):
        arrive(instance, request(f"d{number}", output=4))
    assert len(ran(instance)) == 4
    arrive(instance, request("earlier", arrival_s=1.0, output=50))
    instance.submit(request("prompt", prompt=40, arrival_s=2.0, output=50), decodes_here=True)
    batch, later = list[str](), 0
    while "prompt" not in batch and later < 40:
        arrive(instance, request(f"later{later}", arrival_s=3.0 + later, output=4))
        batch, later = ran(instance), later + 1
    assert later < 10
    assert {"earlier", "prompt"} <= set(batch)


def test_a_started_prompt_keeps_its_slot_beside_hand_offs():
    started = prefilling(300, computed=100, name="s0")
    chosen = selected(BATCHERS["chunked-prefill"](64, 4), decoding(2), ready(3), started)
    assert chosen.resume == ["r0"]
    assert [name for name, _ in chosen.prefills] == ["s0"]


def inlined(tbt_s, budget=2048):
    """Return an `inlined` batcher with a simple performance model."""
    # An iteration takes 4 ms, plus 1 ms per prompt token and per decode.
    return InlinedPrefill(budget, 64, ToyModel(), tbt_s)


def test_inlines_prompts_within_the_tbt_bound():
    chosen = selected(inlined(0.020), waiting(10, 10, 1), decoding(2), ready(1))
    assert (chosen.prefills, chosen.resume) == ([("w0", 10)], ["r0"])
    assert selected(inlined(0.030), waiting(10, 10, 1), decoding(2)).prefills == [("w0", 10), ("w1", 10), ("w2", 1)]


def test_a_prompt_is_inlined_whole_or_not_at_all():
    """`inlined` adds a prompt to a decode batch only if the whole prompt fits."""
    assert selected(inlined(0.020), waiting(100), decoding(1)).prefills == []
    assert selected(inlined(1.0, budget=64), waiting(100), decoding(1)).prefills == []
    assert selected(inlined(0.020, budget=64), waiting(100)).prefills == [("w0", 100)]


def test_chunked_prefill_fills_the_budget_that_decodes_leave():
    """`chunked-prefill` spends the token budget on decodes, then on started prompts, then on new ones."""
    started = prefilling(300, computed=100, name="s0")
    chosen = selected(BATCHERS["chunked-prefill"](256, 64), waiting(100), decoding(1), ready(1), started)
    assert chosen.resume == ["r0"]
    assert chosen.prefills == [("s0", 200), ("w0", 54)]
    assert [item.samples for item in chosen.items] == [True, False]


def test_chunked_prompt_allocates_blocks_once():
    """The first chunk of a prompt allocates blocks for the whole prompt."""
    started = prefilling(300, computed=100, name="s0")
    chunked = BATCHERS["chunked-prefill"](256, 64)
    assert selected(chunked, started, waiting(10), room(blocks=0)).prefills == [("s0", 200)]


def test_chunks_of_a_long_prompt_are_about_equal():
    """With chunks of at most 10 tokens, `prefill-chunks` divides 25 tokens into 9, 8 and 8."""
    chunks = BATCHERS["prefill-chunks"](10, 64)
    cut = [selected(chunks, prefilling(25, computed=done)).prefills[0][1] for done in (0, 9, 17)]
    assert cut == [9, 8, 8]


def test_short_prompts_run_whole_beside_a_chunk_or_wait():
    """`prefill-chunks` adds a short prompt to a chunk only if the whole prompt fits."""
    chunks = BATCHERS["prefill-chunks"](10, 64)
    for others, beside in (((2, 5, 1), [("w0", 2)]), ((3, 1), [])):
        started = prefilling(25, computed=9, name="s0")
        assert selected(chunks, started, waiting(*others)).prefills == [("s0", 8), *beside]


@pytest.mark.parametrize("name", sorted(set(BATCHERS) - ONLY_PREFILL))
def test_ready_sequence_waits_for_output_blocks(name):
    """Smaller sequences do not overtake a sequence that waits for blocks."""
    batcher = BATCHERS[name](2048, 64)
    sequences = ready(3, output_tokens=(4, 500, 4))
    assert selected(batcher, sequences, room(blocks=10)).resume == ["r0"]


@pytest.mark.parametrize("name", sorted(set(BATCHERS) - ONLY_DECODE - {"splitwise-sim"}))
def test_starts_no_more_prompts_than_free_slots(name):
    assert selected(BATCHERS[name](2048, 64), waiting(10, 10, 10), room(seats=2)).prefills == [("w0", 10), ("w1", 10)]


@pytest.mark.parametrize("name", sorted(BATCHERS))
def test_empty_queues_give_an_empty_selection(name):
    chosen = selected(BATCHERS[name](512, 8))
    assert (chosen.prefills, chosen.resume, chosen.pause) == ([], [], [])


@pytest.mark.parametrize("name", sorted(BATCHERS))
def test_running_decodes_are_not_part_of_a_selection(name):
    chosen = selected(BATCHERS[name](512, 8), decoding(3))
    assert (chosen.prefills, chosen.resume, chosen.pause) == ([], [], [])
