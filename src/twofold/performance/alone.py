"""A request that has an instance to itself: what slow-downs are measured against."""

from twofold.performance.base import PerformanceModel


def alone(model: PerformanceModel, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
    """(TTFT, TPOT) in seconds: one prefill of the whole prompt, then decodes of one sequence.

    Prefill makes the first token. The decode that makes token i + 1 reads the prompt and the i tokens before
    it, so over i = 1 … n − 1 the mean context is prompt + n/2. With one output token there is no decode: TPOT
    is then what the first one would have taken.
    """
    cost = model.decode_cost(1)
    context = prompt_tokens + max(output_tokens, 2) / 2
    ttft_s = model.prefill_s(prompt_tokens, prompt_tokens * prompt_tokens)
    return ttft_s, cost.base_s + cost.context_s * context
