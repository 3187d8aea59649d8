"""The instance scheduler over the life of a request."""

import pytest

from support.scheduled import EPOCH, arrive, ran, request, scheduler, step
from twofold.kvcache.allocator import BlockAllocator
from twofold.kvcache.paged import PagedBlockAllocator
from twofold.request import FinishReason


def test_colocated_request_runs_to_completion():
    """Prefill generates token 0, each decode iteration one token, and the last token ends the request."""
    mixed = scheduler("mixed")
    mixed.submit(request("a"), decodes_here=True)
    outcomes = [step(mixed)[0] for _ in range(3)]
    assert [o.index for o in outcomes] == [0, 1, 2]
    assert [o.finish_reason for o in outcomes] == [None, None, FinishReason.LENGTH]
    assert mixed.status().idle
    assert mixed.empty


def test_stop_token_ends_a_request_early():
    mixed = scheduler("mixed")
    mixed.submit(request("a"), decodes_here=True)
    assert step(mixed, stopped={"a"})[0].finish_reason is FinishReason.STOP
    assert mixed.next_batch(0.0) is None


def test_stop_token_ends_only_its_own_request():
    """A request that stops early makes room for a waiting request."""
    decode = scheduler("decode", max_num_seqs=2)
    for name in "abc":
        arrive(decode, request(name, output=9))
    outcomes = step(decode, stopped={"a"})
    assert [(o.request_id, o.index, o.finish_reason) for o in outcomes] == [("a", 1, FinishReason.STOP), ("b", 1, None)]
    assert ran(decode) == ["b", "c"]


def test_holds_prefill_blocks_until_the_handoff_ends():
    prefill = scheduler("prefill")
    prefill.submit(request("a"), decodes_here=False)
    outcome = step(prefill)[0]
    assert outcome.hands_off
    assert prefill.status().blocks_free == 61
    prefill.handed_off("a")
    assert prefill.status().idle


def test_grants_leases_in_order():
    """A small reservation of blocks does not overtake an earlier large reservation."""
    decode = scheduler("decode", num_blocks=10)
    for name, prompt in (("a", 20), ("b", 30), ("c", 4)):
        decode.reserve(request(name, prompt=prompt), "p")
    assert [lease.request_id for lease in decode.grant(0.0)] == ["a"]
    decode.abort("a")
    assert decode.grant(0.0) == [], "the source of a's lease may still write"
    decode.kv_received("a", EPOCH)
    assert [lease.request_id for lease in decode.grant(0.0)] == ["b", "c"]


@pytest.mark.parametrize("accounts", [PagedBlockAllocator, BlockAllocator])
def test_lease_now_overtakes_the_queue_or_changes_nothing(accounts):
    decode = scheduler("decode", num_blocks=10, accounts=accounts)
    decode.reserve(request("large", prompt=60), "p")
    assert decode.grant(0.0) == []
    lease = decode.lease_now(request("a", prompt=20), "p", 5.0)
    assert (lease.request_id, lease.source, lease.epoch, lease.deadline_s) == ("a", "p", EPOCH, 15.0)
    before = decode.status()
    assert decode.lease_now(request("b", prompt=20), "p", 5.0) is None
    assert decode.status() == before
    with pytest.raises(ValueError, match="already here"):
        decode.lease_now(request("a", prompt=20), "p", 5.0)
    assert decode.kv_received("a", EPOCH)
    assert ran(decode) == ["a"]


def test_received_request_decodes_from_its_second_token():
    """A decode instance starts at token index 1, because prefill generated token 0."""
    decode = scheduler("decode")
    decode.reserve(request("a"), "p")
    decode.grant(0.0)
    assert decode.next_batch(0.0) is None, "nothing runs before the KV cache has landed"
    assert decode.kv_received("a", EPOCH)
    assert [step(decode)[0].index for _ in range(2)] == [1, 2]
    assert decode.status().idle


def test_holds_blocks_of_an_aborted_request_until_its_batch_ends():
    mixed = scheduler("mixed")
    mixed.submit(request("a"), decodes_here=True)
    batch = mixed.next_batch(0.0)
    mixed.abort("a")
    assert mixed.status().blocks_free == 61
    assert mixed.complete(batch) == []
    assert mixed.status().idle


def test_abort_of_all_requests_leaves_nothing_to_run():
    mixed = scheduler("mixed")
    mixed.submit(request("a", output=50), decodes_here=True)
    step(mixed)
    batch = mixed.next_batch(0.0)
    mixed.abort("a")
    assert mixed.complete(batch) == []
    assert mixed.next_batch(0.0) is None
    assert mixed.next_batch(0.0) is None


def test_rejects_a_duplicate_request_in_any_state():
    mixed = scheduler("splitwise", budget=10)
    again = (
        lambda name: mixed.submit(request(name), decodes_here=True),
        lambda name: mixed.reserve(request(name), "p"),
        lambda name: mixed.lease_now(request(name), "p", 0.0),
    )
    mixed.reserve(request("arriving"), "p")
    mixed.grant(0.0)
    for name in ("paused", "ready"):
        arrive(mixed, request(name, output=9))
    ran(mixed)
    mixed.submit(request("handing off", prompt=1), decodes_here=False)
    ran(mixed)
    mixed.submit(request("runs"), decodes_here=True)
    mixed.next_batch(0.0)
    mixed.submit(request("waiting"), decodes_here=True)
    mixed.reserve(request("wants a lease", prompt=1000), "p")
    for name in ("arriving", "paused", "ready", "handing off", "runs", "waiting", "wants a lease"):
        for call in again:
            with pytest.raises(ValueError, match=f"{name} is already here"):
                call(name)


def test_lost_peer_ends_its_reservations_and_leases():
    """If a prefill instance is lost, the leases and reservations of other prefill instances continue."""
    decode = scheduler("decode", num_blocks=10)
    for name, prompt, source in (("a", 20, "dead"), ("b", 30, "dead"), ("c", 4, "alive")):
        decode.reserve(request(name, prompt=prompt), source)
    decode.grant(0.0)
    assert decode.peer_lost("dead") == ["b", "a"]
    for name in "ab":
        decode.abort(name)
    assert [lease.request_id for lease in decode.grant(0.0)] == ["c"]


def test_rejects_completion_of_batches_that_were_not_started():
    decode = scheduler("decode")
    arrive(decode, request("a", output=5))
    with pytest.raises(RuntimeError, match="only a batch that was started"):
        decode.advance(1)
    assert decode.start(0.0).limit == 4
    with pytest.raises(RuntimeError, match="has not been completed"):
        decode.start(0.0)
    with pytest.raises(RuntimeError, match="only a batch that was started"):
        decode.advance(5)


def test_batch_describes_its_work():
    mixed = scheduler("splitwise", budget=12)
    arrive(mixed, request("a", prompt=7, output=9))
    arrive(mixed, request("b", prompt=8, output=9))
    first = mixed.start(0.0)
    assert (first.prefill_tokens, first.prefill_sequences, first.limit) == (0, 0, 8)
    assert (first.decode_sequences, first.context_tokens) == (2, 15)
    assert [s.id for s in first.joined] == ["a", "b"]
    mixed.submit(request("p", prompt=6), decodes_here=False)
    mixed.submit(request("q", prompt=5), decodes_here=False)
    mixed.advance(2)
    second = mixed.start(0.0)
    assert (second.prefill_tokens, second.prefill_sequences, second.limit) == (11, 2, 1)
    assert (second.decode_sequences, second.context_tokens) == (1, 9)
    assert ([s.id for s in second.joined], [s.id for s in second.paused]) == ([], ["b"])
    mixed.advance(1)
    third = mixed.start(0.0)
    assert (third.decode_sequences, third.context_tokens, third.limit) == (2, 10 + 10, 5)
    assert ([s.id for s in third.joined], list(third.paused)) == (["b"], [])
    assert mixed.preemptions == 1


def test_queued_excludes_the_running_batch():
    mixed = scheduler("mixed", max_num_seqs=2)
    for name in "abc":
        mixed.submit(request(name), decodes_here=True)
    assert mixed.queued == 3
    mixed.next_batch(0.0)
    assert mixed.queued == 1
    assert not mixed.empty


@pytest.mark.parametrize("aborted", [False, True])
@pytest.mark.parametrize("complete", [False, True])
def test_holds_blocks_until_a_pull_ends(aborted, complete):
    """Blocks are not freed before the pull of KV into them has ended."""
    decode = scheduler("decode", num_blocks=4)
    decode.reserve(request("a"), "p")
    decode.grant(0.0)
    assert decode.read_started("a", EPOCH)
    assert "a" not in decode.leases
    if aborted:
        decode.abort("a")
    decode.reserve(request("b"), "p")
    assert decode.grant(0.0) == []
    assert decode.read_ended("a", complete=complete) is (complete and not aborted)
    if complete and not aborted:
        assert ran(decode) == ["a"]
    decode.abort("a")
    assert [lease.request_id for lease in decode.grant(0.0)] == ["b"]


def test_refuses_a_pull_for_an_aborted_request():
    decode = scheduler("decode")
    decode.reserve(request("a"), "p")
    decode.grant(0.0)
    decode.abort("a")
    assert not decode.read_started("a", EPOCH)
    assert decode.status().idle
