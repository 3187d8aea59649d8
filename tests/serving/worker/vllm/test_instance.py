"""Block accounting and hand-offs of vLLM workers, tested with random events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from twofold.engine.vllm.bridge import VllmBlockCounts
from twofold.request import Request
from twofold.serving.worker.vllm.scheduler import VllmOrder, VllmScheduler

BLOCK, TOTAL = 4, 64
EPOCH = 7


class Vllm:
    """Fake of vLLM's block pool."""

    def __init__(self):
        self.free = set(range(TOTAL))
        self.held = {}  # blocks by request
        self.over = set()  # ended requests with blocks that are still held
        self.awaited = set()  # requests that wait for their KV
        self.instance = VllmScheduler(
            lambda: VllmBlockCounts(TOTAL, len(self.free)), BLOCK, instance="d", epoch=EPOCH, lease_s=10.0, watcher=None
        )

    def take(self, request_id, tokens):
        blocks = [self.free.pop() for _ in range(-(-tokens // BLOCK))]
        self.held[request_id] = blocks
        return blocks

    def finish(self, request_id, *, hold=False):
        """End a request; its blocks are freed once its KV transfers have ended."""
        waits = request_id in self.awaited
        if request_id not in self.held:
            return
        holds = self.instance.holds(request_id)
        if waits or holds or hold:
            self.over.add(request_id)
        else:
            self.give_back(request_id)

    def give_back(self, request_id):
        self.free.update(self.held.pop(request_id))
        self.over.discard(request_id)

    def settle(self):
        """Tell the fake vLLM which KV transfers have finished."""
        settled = self.instance.settle()
        for request_id in settled.received:
            assert request_id in self.awaited
            self.awaited.discard(request_id)
            if request_id in self.over:
                self.give_back(request_id)
        for request_id in settled.sent:
            assert request_id in self.over
            self.give_back(request_id)

    def obey(self):
        """Abort or resume requests in the fake vLLM, as requested by the scheduler."""
        for order, request_id in self.instance.take_orders():
            held = self.instance.find(request_id)
            if order is VllmOrder.ABORT:
                self.finish(request_id)
            elif order is VllmOrder.RESUME and held is not None:
                self.instance.resume(held)


class Instance(RuleBasedStateMachine):
    """A state machine that tests the scheduler with random events from peers, clients and vLLM."""

    queued, leased, running, sending = (Bundle("queued"), Bundle("leased"), Bundle("running"), Bundle("sending"))

    def __init__(self):
        super().__init__()
        self.vllm = Vllm()
        self.count = 0
        self.touched = {}  # blocks that a peer, or our own reading, may still touch

    @property
    def instance(self):
        return self.vllm.instance

    def request(self):
        self.count += 1
        return Request(id=f"r{self.count}", arrival_s=0.0, prompt_tokens=1 + self.count % 9, output_tokens=5)

    @rule(target=queued)
    def reserve(self):
        request = self.request()
        self.instance.reserve(request, "p")
        return request

    @rule(target=leased, request=consumes(queued))
    def vllm_makes_room(self, request):
        """Let vLLM allocate KV blocks for a request, or abort the request if fewer than 8 KV blocks are free."""
        self.vllm.obey()
        if not self.instance.is_remote(request.id) or len(self.vllm.free) < 8:
            self.instance.abort(request.id)
            return request
        blocks = self.vllm.take(request.id, request.prompt_tokens)
        self.vllm.awaited.add(request.id)
        self.instance.allocated(request.id, blocks)
        (lease,) = self.instance.grant(0.0)
        assert lease.blocks == tuple(blocks)
        self.touched[request.id] = set(blocks)
        return request

    @rule(request=leased)
    def abort_while_it_arrives(self, request):
        self.instance.abort(request.id)

    @rule(target=running, request=consumes(leased), way=st.sampled_from(["written", "read", "given up", "cut"]))
    def it_arrives(self, request, way):
        """Complete or abort the KV transfer of a request."""
        instance = self.instance
        alive = instance.find(request.id) is not None and request.id in self.touched
        if way == "read":
            if instance.read_started(request.id, EPOCH):
                assert instance.read_ended(request.id, complete=True) is alive
        elif way == "written":
            assert instance.kv_received(request.id, EPOCH) is alive
        elif way == "cut":
            for lost in instance.peer_lost("p"):
                self.touched.pop(lost, None)
                instance.abort(lost)
        else:
            instance.end_lease(request.id, EPOCH)
            instance.abort(request.id)
        self.touched.pop(request.id, None)
        return request

    @rule(request=consumes(running))
    def it_ends(self, request):
        """Finish a running request in the fake vLLM, unless the request was aborted."""
        self.vllm.obey()
        self.vllm.settle()
        if self.instance.find(request.id) is not None:
            self.vllm.finish(request.id)
            self.instance.ended(request.id)

    @rule(target=sending)
    def prefill_and_hand_off(self):
        request = self.request()
        self.instance.submit(request, decodes_here=False)
        self.vllm.obey()
        if len(self.vllm.free) < 8:
            self.instance.abort(request.id)
            self.instance.handed_off(request.id)
            return request
        self.touched[request.id] = set(self.vllm.take(request.id, request.prompt_tokens))
        self.vllm.finish(request.id)
        self.instance.ended(request.id)
        return request

    @rule(request=consumes(sending))
    def sent(self, request):
        self.touched.pop(request.id, None)
        self.instance.handed_off(request.id)

    @rule()
    def iteration(self):
        self.vllm.obey()
        self.vllm.settle()

    @invariant()
    def nothing_is_free_that_may_be_touched(self):
        for blocks in self.touched.values():
            assert not blocks & self.vllm.free

    @precondition(lambda self: not self.touched)
    @invariant()
    def no_lease_is_left_behind(self):
        assert self.instance.status().blocks_in_flight == 0

    def teardown(self):
        """Abort all requests, and check that all blocks in vLLM's pool are free."""
        for lost in self.instance.peer_lost("p"):
            self.instance.abort(lost)
        for number in range(1, self.count + 1):
            self.instance.abort(f"r{number}")
            self.instance.handed_off(f"r{number}")
        for _ in range(2):
            self.vllm.obey()
            self.vllm.settle()
        assert self.instance.status().idle
        assert not self.vllm.held


TestInstance = Instance.TestCase


def test_rejects_a_duplicate_request():
    instance = Vllm().instance
    request = Request(id="a", arrival_s=0.0, prompt_tokens=3, output_tokens=2)
    instance.submit(request, decodes_here=True)
    with pytest.raises(ValueError, match="already on this worker"):
        instance.reserve(request, "p")


@given(aborted=st.booleans())
def test_an_abort_during_allocation_returns_the_blocks(aborted):
    vllm = Vllm()
    vllm.instance.reserve(Request(id="a", arrival_s=0.0, prompt_tokens=3, output_tokens=2), "p")
    vllm.obey()
    assert vllm.instance.is_remote("a")
    if aborted:
        vllm.instance.abort("a")
    blocks = vllm.take("a", 3)
    vllm.awaited.add("a")
    vllm.instance.allocated("a", blocks)
    assert len(vllm.instance.grant(0.0)) == (not aborted)
    vllm.instance.end_lease("a", EPOCH)
    vllm.instance.abort("a")
    vllm.obey()
    vllm.settle()
    assert vllm.instance.status().idle
