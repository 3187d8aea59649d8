"""Registry of batchers, which maps names to batcher classes."""

from twofold.compat.splitwise_sim import SplitwiseSimBatcher
from twofold.performance.base import PerformanceModel
from twofold.scheduling.batchers.mixed import ChunkedPrefill, InlinedPrefill, MixedContinuous, PrefillFirst
from twofold.scheduling.batchers.one_phase import DecodeFcfs, PrefillBalanced, PrefillChunks, PrefillFcfs
from twofold.scheduling.batchers.splitwise import SplitwiseMixed
from twofold.scheduling.instance.batcher import Batcher

# Each class is called with the token budget and the maximum number of sequences of an iteration.
BATCHERS: dict[str, type[Batcher]] = {
    "prefill": PrefillFcfs,
    "prefill-balanced": PrefillBalanced,
    "prefill-chunks": PrefillChunks,
    "decode": DecodeFcfs,
    "mixed": MixedContinuous,
    "inlined": InlinedPrefill,
    "prefill-first": PrefillFirst,
    "chunked-prefill": ChunkedPrefill,
    "splitwise": SplitwiseMixed,
    "splitwise-sim": SplitwiseSimBatcher,
}

INLINED = "inlined"  # takes a bound on the iteration time


def create_batcher(
    name: str,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    times: PerformanceModel | None = None,
    tbt_s: float | None = None,
) -> Batcher:
    """Create the batcher called `name`."""
    # Only the batcher `inlined` uses `times` and `tbt_s`.
    if name == INLINED and times is not None and tbt_s is not None:
        return InlinedPrefill(max_num_batched_tokens, max_num_seqs, times, tbt_s)
    return BATCHERS[name](max_num_batched_tokens, max_num_seqs)


def can_swap(name: str) -> bool:
    """Return whether the batcher `name` supports swapping decodes out to host memory."""
    return BATCHERS[name].decodes and not BATCHERS[name].may_preempt


def batchers_with(trait: str) -> list[str]:
    """Return the names of the batchers whose boolean class attribute named `trait` is True."""
    return [name for name, batcher in BATCHERS.items() if getattr(batcher, trait)]
