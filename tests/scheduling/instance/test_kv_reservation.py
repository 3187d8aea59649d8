"""Reservation of KV blocks for prompts and outputs."""

from hypothesis import given
from hypothesis import strategies as st

from support.scheduled import arrive, ran, request, scheduler, step
from twofold.scheduling.instance.sequence import FULL_RESERVATION, KvReservation

LATE = KvReservation(output_at_decode_start=True)


def test_handed_off_prompt_reserves_no_output():
    assert FULL_RESERVATION.at_start(16, 8, decodes_here=True) == 16 + 8 - 1
    assert FULL_RESERVATION.at_start(16, 8, decodes_here=False) == 16
    assert FULL_RESERVATION.at_decode_start(8) == 0


@given(st.integers(1, 1000), st.integers(1, 1000), st.booleans(), st.integers(0, 3))
def test_reservations_add_up_to_the_full_length(prompt, output, late, extra):
    rule = KvReservation(late, extra)
    at_start = rule.at_start(prompt, output, decodes_here=True)
    assert at_start + rule.at_decode_start(output) == rule.in_all(prompt, output)
    # The last output token needs no KV.
    assert rule.in_all(prompt, output) == prompt + output - 1 + extra
    assert rule.at_start(prompt, output, decodes_here=False) == prompt + extra


def test_output_waits_for_blocks_after_its_prefill():
    """A smaller decode does not overtake a decode that waits for output blocks."""
    decode = scheduler("decode", num_blocks=12, memory=LATE)
    arrive(decode, request("a", prompt=8, output=17))  # 2 blocks, and 4 for the output
    arrive(decode, request("b", prompt=8, output=17))
    arrive(decode, request("c", prompt=4, output=2))  # 1 block, and 1 for the output
    assert ran(decode) == ["a"], "5 blocks hold prompts, 4 hold output, 3 are free"
    assert decode.status().blocks_free == 3
    assert decode.queued == 2
    for _ in range(15):
        assert ran(decode) == ["a"]
    assert ran(decode) == ["b", "c"]


def test_prompt_starts_without_blocks_for_its_output():
    """A prompt does not wait for output blocks if these are allocated at decode start."""
    for memory, started in ((FULL_RESERVATION, 1), (LATE, 0)):
        mixed = scheduler("mixed", num_blocks=5, memory=memory)
        mixed.submit(request("a", prompt=8, output=21), decodes_here=True)
        assert (mixed.next_batch(0.0) is None) == started


def test_lease_excludes_output_reserved_later():
    """A lease covers no output blocks if these are allocated at decode start."""
    decode = scheduler("decode", num_blocks=10, memory=KvReservation(output_at_decode_start=True, extra=1))
    decode.reserve(request("a", prompt=8, output=5), "p")
    (lease,) = decode.grant(0.0)
    assert len(lease.blocks) == 3
    decode.kv_received("a", lease.epoch)
    step(decode)
    assert decode.status().blocks_free == 10 - 3 - 1
    for _ in range(3):
        step(decode)
    assert decode.status().idle


def test_paused_decodes_keep_their_output_blocks():
    """A decode allocates its output blocks once, however often it is paused and resumed."""
    mixed = scheduler("splitwise", num_blocks=20, budget=10, memory=LATE)
    arrive(mixed, request("a", prompt=8, output=9))
    assert ran(mixed) == ["a"]
    assert mixed.status().blocks_free == 20 - 4
    mixed.submit(request("p", prompt=10, output=1), decodes_here=True)
    assert ran(mixed) == ["p"]
    assert mixed.queued == 1
    assert ran(mixed) == ["a"]
    assert mixed.status().blocks_free == 20 - 4
