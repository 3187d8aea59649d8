"""How much prefill each block of a prompt saves when it is there: seconds of an instance, by a performance model."""

from collections.abc import Sequence

from twofold.performance.base import PerformanceModel
from twofold.performance.reuse import reuse_s
from twofold.workload.rescale import BLOCK_TOKENS


def savings_s(model: PerformanceModel, prompt_tokens: int, loads_s: Sequence[float]) -> list[float]:
    """For each of the leading blocks of a prompt the seconds that it saves beyond what those before it do.

    `loads_s` are what loading each of them takes, in order; it hides behind computing the rest of the prompt. Blocks
    that would take longer to load than to compute are computed and save nothing. At least the last token of a prompt
    is always computed: it makes the first of the output.
    """
    whole_s = model.prefill_s(prompt_tokens, prompt_tokens * prompt_tokens)
    most_s = load_s = 0.0
    gains = []
    for number, block_s in enumerate(loads_s, start=1):
        load_s += block_s
        reused = min(number * BLOCK_TOKENS, prompt_tokens - 1)
        saved_s = max(most_s, whole_s - reuse_s(model, prompt_tokens, reused, load_s))
        gains.append(saved_s - most_s)
        most_s = saved_s
    return gains
