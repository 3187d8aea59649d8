"""A worker that runs in the test's process, with a model and a client of the host's KV store."""

import threading
import time
from contextlib import contextmanager
from functools import partial

from support.waiting import until
from twofold.engine.torch.engine import TorchEngine
from twofold.engine.torch.pool import KvPool
from twofold.handoff import HandoffMode
from twofold.kvcache.allocator import LeaseTable
from twofold.kvcache.cache import PrefixCache
from twofold.kvcache.eviction import create_eviction
from twofold.kvcache.paged import PrefixBlockAllocator
from twofold.kvcache.prefix import prefix_keys, root_key
from twofold.request import BlockChain, Request, SamplingParams
from twofold.scheduling.batchers import BATCHERS
from twofold.scheduling.instance.scheduler import InstanceScheduler
from twofold.serving.messages import RequestFailed, StepDone
from twofold.serving.store.copier import PoolCopier
from twofold.serving.worker.batch_loop import BatchLoop
from twofold.serving.worker.prefix_store import StoredPrefixes
from twofold.serving.worker.receiver import HandoffReceiver
from twofold.serving.worker.sender import HandoffSender
from twofold.serving.worker.state import KvLanding, SharedWorkerState, TokenSequence

BLOCK = 16
CHAIN = BlockChain(root_key(b""), BLOCK)


class GatedCopier:
    """A block copier that a test can suspend; it records its copies."""

    def __init__(self, copier):
        self.layers, self.span = copier.layers, copier.span
        self.done = []
        self._copier, self._open = copier, threading.Event()
        self._open.set()

    def hold(self, layer):
        self._held = layer
        self.done.clear()
        self._open.clear()

    def open(self):
        self._open.set()

    def read(self, memory, layer, slots, blocks):
        if not self._open.is_set() and layer >= self._held:
            self._open.wait()
        self._copier.read(memory, layer, slots, blocks)
        self.done.append(("read", layer))

    def write(self, memory, layer, slots, blocks):
        self._copier.write(memory, layer, slots, blocks)
        self.done.append(("write", layer))


class RecordingOutbox:
    """Stub of the outbox that records the tokens of each request."""

    def __init__(self):
        self.tokens, self.reused, self.failed = {}, {}, set()

    def send(self, _address, message):
        if isinstance(message, StepDone):
            for request_id, output in message.tokens:
                self.tokens.setdefault(request_id, []).append(output.token_id)
                self.reused.setdefault(request_id, output.reused_tokens)
        elif isinstance(message, RequestFailed):
            self.failed.add(message.request_id)


class StoreWorker:
    """A worker that runs its batch loop on a thread and loads prefixes from a KV store."""

    def __init__(self, model, client, num_blocks):
        self.pool = KvPool(model.layout(BLOCK), num_blocks)
        self.copier = GatedCopier(PoolCopier(self.pool))
        self.engine = TorchEngine(model, self.pool)
        self.shared = PrefixBlockAllocator(BLOCK, PrefixCache(num_blocks, create_eviction("lru")))
        self.outbox = RecordingOutbox()
        self.scheduler = InstanceScheduler(
            BATCHERS["mixed"](2048, 16), self.shared, LeaseTable(self.shared, "w", 1, 10.0), 16
        )
        self.state = SharedWorkerState(
            instance="w",
            scheduler=self.scheduler,
            sender=HandoffSender(self.copier.layers, time.monotonic),
            receiver=HandoffReceiver(),
            landing=KvLanding(),
            peers=None,
            outbox=self.outbox,
            controller="",
        )
        self.state.prefixes = StoredPrefixes(self.state, self.scheduler, client, self.copier)
        self.state.prefixes.start()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        BatchLoop(self.state, self.scheduler, self.engine, frozenset()).run()

    def close(self):
        self.copier.open()
        with self.state.changed:
            self.state.closing = True
            self.state.changed.notify()
        self._thread.join()

    def submit(self, name, prompt, output, *, target=None):
        """Submit a request to the worker."""
        request = Request(
            id=name,
            arrival_s=0.0,
            prompt_tokens=len(prompt),
            output_tokens=output,
            prefix_blocks=tuple(prefix_keys(prompt, BLOCK)),
        )
        sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        with self.state.changed:
            self.state.sequences[name] = TokenSequence(
                sampling, token_ids=list(prompt), block_keys=list(request.prefix_blocks), chain=CHAIN
            )
            if target is not None:
                self.state.sender.expect(name, target, HandoffMode.LAYER_WISE)  # the hand-off never gets a lease
            queue = partial(self.state.scheduler.submit, request, decodes_here=target is None)
            self.state.prefixes.bring(name, request.prefix_blocks, queue)
            self.state.changed.notify()

    def abort(self, name):
        with self.state.changed:
            self.state.abort(name)
            self.state.changed.notify()

    def answer(self, name, prompt, output):
        """Run a request and return its output tokens and its number of reused prompt tokens."""
        self.submit(name, prompt, output)
        until(lambda: len(self.outbox.tokens.get(name, ())) == output)
        return self.outbox.tokens[name], self.outbox.reused[name]

    def idle(self):
        """Return whether the worker has no KV blocks in use and no pending copies."""
        with self.state.changed:
            return (
                self.shared.num_free == self.shared.num_blocks
                and not self.shared.num_in_flight
                and not self.state.prefixes._held_blocks
            )


@contextmanager
def store_worker(model, client, num_blocks=160):
    """Yield a worker with `num_blocks` KV blocks, and check that all of them are free at the end."""
    worker = StoreWorker(model, client, num_blocks)
    try:
        yield worker
        worker.copier.open()
        until(worker.idle)
    finally:
        worker.close()
