"""Events after which an instance must select a new batch instead of repeating the last one."""

import pytest

from support.scheduled import EPOCH, arrive, ran, request, scheduler
from twofold.kvcache.allocator import BlockAllocator
from twofold.kvcache.paged import PagedBlockAllocator


def in_a_run(batcher="mixed", **more):
    """Return an instance that has started a batch with one decode."""
    made = scheduler(batcher, **more)
    arrive(made, request("d", prompt=4, output=40))
    assert made.changed
    assert made.start(0.0).limit == 39
    assert not made.changed
    return made


def test_selection_holds_until_a_decode_ends():
    made = in_a_run()
    made.advance(10)
    assert made.start(0.0).limit == 29
    (outcome,) = made.advance(29)
    assert outcome.index == 39
    assert made.start(0.0) is None


@pytest.mark.parametrize(
    "happens",
    [
        lambda made: made.submit(request("p"), decodes_here=True),
        lambda made: arrive(made, request("r")),
        lambda made: made.abort("d"),
    ],
    ids=["a prompt came", "a KV cache landed", "a request was aborted"],
)
def test_arrivals_and_aborts_set_changed(happens):
    made = in_a_run()
    happens(made)
    assert made.changed
    made.advance(3)
    made.start(0.0)
    assert not made.changed


@pytest.mark.parametrize(
    "happens",
    [
        lambda made: made.reserve(request("p"), "source"),
        lambda made: made.lease_now(request("p"), "source", 0.0),
        lambda made: made.abort("nobody"),
        lambda made: made.handed_off("nobody"),
    ],
    ids=["a reservation", "a lease", "an abort of nobody", "a hand-off of nobody"],
)
def test_requests_that_cannot_start_do_not_set_changed(happens):
    made = in_a_run()
    happens(made)
    assert not made.changed


@pytest.mark.parametrize("accounts", [PagedBlockAllocator, BlockAllocator])
def test_finished_handoff_sets_changed_for_a_waiting_prompt(accounts):
    """The end of a hand-off frees blocks that a waiting prompt needs."""
    made = scheduler("prefill", num_blocks=8, accounts=accounts)
    made.submit(request("a", prompt=20), decodes_here=False)
    made.submit(request("b", prompt=20), decodes_here=False)
    assert ran(made) == ["a"]
    assert made.next_batch(0.0) is None
    assert not made.changed
    made.handed_off("a")
    assert made.changed
    assert ran(made) == ["b"]


def test_finished_handoff_without_waiting_prompts_does_not_set_changed():
    made = in_a_run("splitwise")
    made.submit(request("a"), decodes_here=False)
    made.advance(1)
    ran(made)
    made.start(0.0)
    made.handed_off("a")
    assert not made.changed


def arriving(made):
    """Lease blocks to one request, so that the prompt of another request must wait."""
    assert made.lease_now(request("a", prompt=20), "source", 0.0) is not None
    made.submit(request("b", prompt=20), decodes_here=True)
    assert made.next_batch(0.0) is None
    assert not made.changed


def abort(made):
    made.abort("a")


def end_lease(made):
    made.end_lease("a", EPOCH)


def land(made):
    assert not made.kv_received("a", EPOCH)


def peer_lost(made):
    assert made.peer_lost("source") == ["a"]


@pytest.mark.parametrize(
    ("first", "last"), [(end_lease, abort), (peer_lost, abort), (abort, end_lease), (abort, land), (abort, peer_lost)]
)
def test_failed_lease_sets_changed_for_a_waiting_prompt(first, last):
    """An aborted request's blocks are free for a waiting prompt once the lease on the blocks has ended."""
    made = scheduler("mixed", num_blocks=8)
    arriving(made)
    first(made)
    assert made.next_batch(0.0) is None, "the source may still write, or the request still has its blocks"
    last(made)
    assert made.status().blocks_free == 8
    assert made.changed


def test_failed_lease_interrupts_a_run_for_a_waiting_prompt():
    made = scheduler("mixed", num_blocks=30)
    arrive(made, request("d", prompt=4, output=40))  # 11 blocks
    assert made.lease_now(request("a", prompt=50), "source", 0.0) is not None  # 13 more
    made.submit(request("b", prompt=26), decodes_here=True)  # 7, and 6 are free
    assert made.start(0.0).limit == 39
    made.abort("a")
    made.end_lease("a", EPOCH)
    made.advance(1)
    assert made.start(0.0).prefill_sequences == 1
