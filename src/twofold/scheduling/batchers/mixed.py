"""Mixed continuous batching: prompts first, and every decode beside them."""

from twofold.scheduling.batcher import EagerBatcher, Room, Selection, take_prompts, take_ready
from twofold.scheduling.queues import Queues


class MixedContinuous(EagerBatcher):
    """The colocated baseline of Splitwise (section 2.3): whole prompts join the running decodes.

    Prompts are not cut, so a long one holds up every decode of its iteration: this is the interference that
    splitting the phases removes. The token budget is for prompts; decodes run beside them.
    """

    def __init__(self, token_budget: int, max_seqs: int) -> None:
        self.token_budget = token_budget
        self.max_seqs = max_seqs

    def select(self, queues: Queues, room: Room) -> Selection:
        resume = take_ready(queues.ready, room, self.max_seqs - queues.decoding.size)
        prompts = take_prompts(
            queues.waiting,
            room,
            self.token_budget,
            max_prompts=self.max_seqs - queues.decoding.size - len(resume),
            longer_runs_alone=True,
        )
        return Selection(prompts, resume)
