"""A lane: sequences that share batches, and the batch that is running.

A sequence's next token depends on its last, so it is in one batch at a time. An instance with pipeline stages
therefore divides its sequences among as many lanes, each of which has one batch in the pipeline; any other instance
has one lane.
"""

from twofold.batch import Batch
from twofold.kvcache.allocator import BlockAllocation
from twofold.scheduling.instance.batcher import SchedulerOutput
from twofold.scheduling.instance.queues import Queues, RunningBatch
from twofold.scheduling.instance.sequence import ScheduledSequence


class Lane:
    """The queues and the running batch of one lane.

    `remaining` is the number of iterations for which the last selection still holds. `message` is the running batch
    as a worker sees it. `aborted` blocks are released when the batch ends. A `single_step` lane runs one iteration a
    batch.
    """

    __slots__ = ("aborted", "batch", "message", "number", "queues", "remaining", "single_step")

    def __init__(self, number: int, queues: Queues, single_step: bool) -> None:
        self.number = number
        self.queues = queues
        self.single_step = single_step
        self.remaining = 0
        self.batch: RunningBatch | None = None
        self.message: Batch | None = None
        self.aborted: list[BlockAllocation] = []

    def start(self, output: SchedulerOutput | None) -> RunningBatch | None:
        """Start the selected batch, or (None) all decodes; None if there is nothing to run."""
        decoding = self.queues.decoding
        decodes, context = decoding.size, decoding.context_tokens
        if output is not None and output.prefills:
            prefills, tokens = output.prefills, 0
            for chunk in prefills:
                tokens += chunk.num_tokens
            batch = RunningBatch(
                prefills, tokens, len(prefills), decodes, context, 1, output.resume, output.pause, self.number
            )
        elif not decodes:
            return None
        else:
            limit = 1 if self.single_step else self.remaining or decoding.iterations_to_end()
            if output is None:
                batch = RunningBatch([], 0, 0, decodes, context, limit, None, None, self.number)
            else:
                if not output.repeatable:
                    limit = 1
                batch = RunningBatch([], 0, 0, decodes, context, limit, output.resume, output.pause, self.number)
        self.batch = batch
        self.remaining = batch.limit
        return batch

    def finish(self, iterations: int) -> RunningBatch:
        """End the running batch after `iterations`; raises RuntimeError if it did not run that many."""
        batch = self.batch
        if batch is None or iterations > batch.limit:
            raise RuntimeError("only a batch that was started can be completed")
        self.batch = self.message = None
        self.remaining -= iterations
        return batch

    def computes(self, sequence: ScheduledSequence) -> bool:
        """Whether the running batch includes a sequence."""
        batch = self.batch
        if batch is None:
            return False
        if sequence.queue is self.queues.decoding:
            return True
        return any(chunk.sequence is sequence for chunk in batch.prefills)
