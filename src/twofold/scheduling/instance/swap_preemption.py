"""Memory that decodes take as they go, and what is done when there is none left: last in, first out.

A sequence begins with room for its prompt and a step of output, and takes a step more whenever that is used up. Where
there is no room, those that came after it are swapped out to the memory of the host, the last first (as in the runtime
of DistServe). They come back when there is room, the first first, and until then nobody new begins. So the one that
came first always goes on, and all end (docs/decisions/0014).

Each has its place in the host's memory promised from the start, so that swapping never fails: the host's memory bounds
how many there are, that of the instance how many run.
"""

from collections.abc import Sequence
from typing import Final

from mypy_extensions import mypyc_attr

from twofold.kvcache.allocator import BlockAllocation, BlockAllocator
from twofold.scheduling.instance.kv_reservation import KvReservation
from twofold.scheduling.instance.queues import Queues
from twofold.scheduling.instance.sequence import ScheduledSequence

STEP_TOKENS: Final = 64


@mypyc_attr(free_list_len=1)
class BlockCopy:
    """The first `blocks` blocks of a sequence go to the host, or come from there; numbers are empty where not known."""

    __slots__ = ("blocks", "device_blocks", "host_blocks", "out")

    def __init__(
        self, out: bool, blocks: int, device_blocks: Sequence[int], host_blocks: Sequence[int]
    ) -> None:
        self.out = out
        self.blocks = blocks
        self.device_blocks = tuple(device_blocks[:blocks])
        self.host_blocks = tuple(host_blocks)


class SwapPreemption:
    """Decides who has memory of an instance (`blocks`) and who is on the `host`, for the scheduler that it belongs to.

    `memory` is the rule that goes with it. `swapped` sequences are on the host now, and `swaps` were there, some more
    than once.

    `copies` are what was decided, in order. A driver carries them out before the iteration that they came with. Blocks
    that a sequence leaves are free at once all the same, because nobody else gets them sooner: while one is swapped
    out nobody is let in, and those that are here compute in that iteration. What one that comes back is given is in
    flight until the end of it.
    """

    def __init__(self, blocks: BlockAllocator, host: BlockAllocator, step_tokens: int = STEP_TOKENS) -> None:
        if step_tokens < 1:
            raise ValueError("memory grows by at least one token at a time")
        self.memory = KvReservation(step=step_tokens)
        self.blocks = blocks
        self.host = host
        self.copies: list[BlockCopy] = []
        self.swapped = 0
        self.swaps = 0
        self.blocks_copied = 0
        self._step = step_tokens
        self._entered = 0
        self._promised = 0  # blocks of the host
        self._offered = 0  # of those, to prompts that a batcher is choosing from
        self._coming: list[BlockAllocation] = []

    # -- coming and going -------------------------------------------------------------------------------------

    def admits(self, sequence: ScheduledSequence, queues: Queues) -> bool:
        """Whether a sequence that wants to begin may: nobody waits to go on, and all keep room for another step."""
        if queues.paused.size:
            return False
        wanted = self.blocks.blocks_for(sequence.start_tokens) + self._margin(queues)
        return (
            wanted <= self.blocks.num_free and self._promised + self._whole(sequence) <= self.host.num_blocks
        )

    def offer(self, queues: Queues) -> int:
        """Blocks that a batcher may give to prompts; each is to be accepted by `take`."""
        self._offered = 0
        return 0 if queues.paused.size else max(0, self.blocks.num_free - self._margin(queues))

    def take(self, sequence: ScheduledSequence) -> bool:
        """Whether the host has a place for a prompt beside those that were offered one before."""
        if not sequence.decodes_here:
            return True
        if self._promised + self._offered + self._whole(sequence) > self.host.num_blocks:
            return False
        self._offered += self._whole(sequence)
        return True

    def enter(self, sequence: ScheduledSequence) -> None:
        """A sequence that will decode here was given its first blocks."""
        self._entered += 1
        sequence.number = self._entered
        self._promised += self._whole(sequence)

    def leave(self, sequence: ScheduledSequence) -> None:
        """Nothing of a sequence is left to do; one that never entered is forgotten as well."""
        if sequence.number:
            sequence.number = 0
            self._promised -= self._whole(sequence)
        if sequence.swapped is not None:
            self._return(sequence, sequence.swapped)

    # -- memory -----------------------------------------------------------------------------------------------

    def lasts(self, sequence: ScheduledSequence) -> int:
        """For how many iterations a sequence that does not decode just now has memory."""
        grant = sequence.grant
        return 0 if grant is None else grant.blocks * self.blocks.block_size - sequence.computed

    def extend(self, sequence: ScheduledSequence) -> bool:
        """Give a sequence whose memory is used up some more, if there is some."""
        grant, tokens = sequence.grant, self._more(sequence)
        if grant is None or not self.blocks.fits(tokens):
            return False
        self.blocks.extend(grant, tokens)
        return True

    def settle(self, queues: Queues) -> list[ScheduledSequence]:
        """Let those that stand still go on as far as there is, or can be made, room; to be called between iterations.

        They are ready then, before all others. Returns the decodes that were running and are swapped out for them.
        """
        stopped: list[ScheduledSequence] = []
        back: list[ScheduledSequence] = []
        standing = sorted(queues.paused, key=_number)
        for sequence in standing:
            if sequence.grant is not None:
                if not self._make_room(sequence, queues, stopped):
                    break
                self.extend(sequence)
                back.append(sequence)
        else:
            if not self.copies:
                self._bring_back(standing, queues, back)
        for sequence in reversed(back):
            queues.paused.remove(sequence)
            queues.ready.prepend(sequence)
        return stopped

    def copied(self) -> None:
        """The iteration that the last copies came with is over, and so are they."""
        for grant in self._coming:
            self.blocks.end_transfer(grant)
        self._coming.clear()

    def take_copies(self) -> list[BlockCopy]:
        """What is to be copied before the iteration that was just started."""
        copies, self.copies = self.copies, []
        return copies

    def _make_room(
        self, sequence: ScheduledSequence, queues: Queues, stopped: list[ScheduledSequence]
    ) -> bool:
        """Room for another step of a sequence, at the cost of those that came after it, if that is enough."""
        wanted, free = self.blocks.blocks_for(self._more(sequence)), self.blocks.num_free
        if wanted <= free:
            return True
        later = [
            other
            for line in (queues.decoding, queues.ready, queues.paused)
            for other in line
            # What a transfer may touch stays where it is.
            if other.number > sequence.number and other.grant is not None and not other.grant.transfers
        ]
        later.sort(key=_number, reverse=True)
        leaving: list[ScheduledSequence] = []
        grants: list[BlockAllocation] = []
        for other in later:
            if free >= wanted:
                break
            leaving.append(other)
            if other.grant is not None:
                grants.append(other.grant)
            free = self.blocks.num_free + self.blocks.freed_by(grants)
        if free < wanted:
            return False
        for other in leaving:
            self._swap_out(other, queues, stopped)
        return True

    def _swap_out(
        self, sequence: ScheduledSequence, queues: Queues, stopped: list[ScheduledSequence]
    ) -> None:
        if sequence.line is queues.decoding:
            queues.decoding.leave(sequence)
            queues.paused.append(sequence)
            stopped.append(sequence)
        elif sequence.line is queues.ready:
            queues.ready.remove(sequence)
            queues.paused.append(sequence)
        grant = sequence.grant
        assert grant is not None  # noqa: S101  (who has none is not asked; tells the type checker so)
        there = sequence.swapped = self.host.allocate(sequence.id, sequence.computed)
        self._copy(True, grant, there)
        self.blocks.release(grant)
        sequence.grant = None
        self.swapped += 1
        self.swaps += 1

    def _bring_back(
        self, standing: list[ScheduledSequence], queues: Queues, back: list[ScheduledSequence]
    ) -> None:
        """As many as there is room for beside a step more of all who run, first come first."""
        for sequence in standing:
            there = sequence.swapped
            if there is None:
                continue
            tokens = sequence.computed + self._more(sequence)
            margin = self._margin(queues) + len(back) * self.blocks.blocks_for(self._step)
            if self.blocks.blocks_for(tokens) + margin > self.blocks.num_free:
                return
            grant = sequence.grant = self.blocks.allocate(sequence.id, tokens)
            self._copy(False, grant, there)
            self.blocks.begin_transfer(grant)
            self._coming.append(grant)
            self._return(sequence, there)
            back.append(sequence)

    def _return(self, sequence: ScheduledSequence, there: BlockAllocation) -> None:
        self.host.release(there)
        sequence.swapped = None
        self.swapped -= 1

    def _copy(self, out: bool, here: BlockAllocation, there: BlockAllocation) -> None:
        self.copies.append(
            BlockCopy(out, there.blocks, self.blocks.blocks_of(here), self.host.blocks_of(there))
        )
        self.blocks_copied += there.blocks

    def _more(self, sequence: ScheduledSequence) -> int:
        """Tokens of the next step; the last output token never needs any KV."""
        whole = sequence.prompt_tokens + sequence.output_tokens - 1
        return min(self._step, whole - sequence.computed)

    def _whole(self, sequence: ScheduledSequence) -> int:
        """Blocks of a sequence in the end."""
        return self.blocks.blocks_for(sequence.prompt_tokens + sequence.output_tokens - 1)

    def _margin(self, queues: Queues) -> int:
        """Blocks of another step of everybody here."""
        return (queues.decoding.size + queues.ready.size) * self.blocks.blocks_for(self._step)


def _number(sequence: ScheduledSequence) -> int:
    return sequence.number
