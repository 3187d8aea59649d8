"""Batchers by name: one file and one line each."""

from collections.abc import Callable

from twofold.compat.splitwise_sim import SplitwiseSimBatcher
from twofold.scheduling.batchers.chunked_prefill import ChunkedPrefill
from twofold.scheduling.batchers.decode_fcfs import DecodeFcfs
from twofold.scheduling.batchers.inlined import InlinedPrefill
from twofold.scheduling.batchers.mixed import MixedContinuous
from twofold.scheduling.batchers.prefill_balanced import PrefillBalanced
from twofold.scheduling.batchers.prefill_chunks import PrefillChunks
from twofold.scheduling.batchers.prefill_fcfs import PrefillFcfs
from twofold.scheduling.batchers.prefill_first import PrefillFirst
from twofold.scheduling.batchers.splitwise import SplitwiseMixed
from twofold.scheduling.instance.batcher import Batcher

# Each takes (token budget of an iteration, sequences in an iteration at most).
BATCHERS: dict[str, Callable[[int, int], Batcher]] = {
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

# Those whose budget is for prompts, which they take whole; one that is longer runs alone.
WHOLE_PROMPTS = ("prefill", "mixed", "inlined", "prefill-first")

# Those beside which memory may grow (`scheduling.growth`): what stands still is left to it.
GROWING = ("decode", "mixed", "chunked-prefill")

# Those that take prompts as long as they are: what is computed already is computed again.
NEVER_REUSING = frozenset({"splitwise-sim"})

# Those that note which task comes next on their instance, and so cannot select for several iterations at once.
UNPIPELINED = frozenset({"splitwise-sim"})

# Those that cut prompts into chunks, of which a pipeline has several under way (`scheduling.chunked_pipeline`).
CHUNKED = frozenset({"prefill-chunks"})

# Goes by the expected times of iterations, and without any by its token budget alone.
INLINED = "inlined"
