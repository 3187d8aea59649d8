"""An emulated engine on a simulated clock, with the iteration times of a performance model."""

import time

from twofold.characterize.local import Stepper
from twofold.characterize.target import TargetLimits
from twofold.kvcache.allocator import BlockAllocator, LeaseTable
from twofold.performance.profile import IterationTimes
from twofold.request import Request
from twofold.scheduling.batchers import create_batcher
from twofold.scheduling.instance.scheduler import InstanceScheduler

TIMES = IterationTimes(
    base_s=0.004, bends=(0, 512), token_s=(1e-4, 3e-4), square_s=2e-9, sequence_s=2e-4, context_s=1e-7, mixed_s=0.002
)


class PacedStepper(Stepper):
    """An emulated engine with a scheduler, whose iterations advance a simulated clock."""

    engine = "paced 1.0"
    vocab_size = 1000

    def __init__(self, times=TIMES, max_num_batched_tokens=2048, max_model_len=8192):
        self.times, self.now, self.ended = times, 0.0, 0.0
        self.limits = TargetLimits(
            max_model_len=max_model_len,
            max_num_seqs=64,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_capacity_tokens=65536,
        )
        blocks = BlockAllocator(4096, 16)
        batcher = create_batcher("chunked-prefill", max_num_batched_tokens, 64)
        self._scheduler = InstanceScheduler(batcher, blocks, LeaseTable(blocks, "here", 0, 1.0), 64)

    def add(self, name, token_ids, output_tokens):
        request = Request(id=name, arrival_s=0.0, prompt_tokens=len(token_ids), output_tokens=output_tokens)
        self._scheduler.submit(request, decodes_here=True)

    def step(self):
        batch = self._scheduler.next_batch(self.now)
        if batch is None:
            return ()
        tokens = squares = decodes = context = 0
        for item in batch.items:
            if item.phase == "prefill":
                tokens += item.num_tokens
                squares += item.num_tokens * (item.num_tokens + 2 * item.context_tokens)
            else:
                decodes, context = decodes + 1, context + item.context_tokens
        self.now += self.times.seconds(tokens, squares, decodes, context) + self.times.cold_start_s(
            self.now - self.ended
        )
        self.ended = self.now
        return [result.request_id for result in self._scheduler.complete(batch)]


def keep_time(monkeypatch, stepper):
    """Replace Python's clocks by the simulated time of `stepper`."""
    monkeypatch.setattr(time, "perf_counter", lambda: stepper.now)
    monkeypatch.setattr(time, "monotonic", lambda: stepper.now)

    def sleep(seconds):
        stepper.now += seconds

    monkeypatch.setattr(time, "sleep", sleep)
