"""Generated workloads of Mooncake's section 8.1 (arXiv 2407.00079v3, table 2), with the paper's results."""

import random
from itertools import chain

import msgspec

from twofold.request import Request
from twofold.workload.blocks import BLOCK_TOKENS
from twofold.workload.distributions import arrival_times

SPLIT, EVEN, VLLM = "3P+1D", "2P+2D", "vLLM"
_FAR = 1 << 20  # maximum blocks of a prompt, so that block ids do not collide
# Concurrent groups: the first prompt of each is usually computed before the next one arrives.
_RECENT = 50


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """Generated workload: Poisson arrivals of requests that all have the same prompt length and output length."""

    name: str
    prompt_tokens: int
    output_tokens: int
    lowest: float  # the paper's lowest rate, in requests/s
    published: dict[str, float]  # the paper's highest rate within the SLO by system (figures 11 and 12)
    claim: str
    shared_tokens: int = 0  # length of the prefix that a group of prompts shares
    prompts_each: int = 1  # mean number of prompts in a group
    individually: bool = False  # the vLLM baseline serves one request at a time and caches prefixes, as in the paper


def _simulated(thousands: int, claim: str, lowest: float, split: float, even: float, vllm: float) -> Setting:
    return Setting(
        name=f"{thousands}k",
        prompt_tokens=thousands * 1024,
        output_tokens=512,
        lowest=lowest,
        published={SPLIT: split, EVEN: even, VLLM: vllm},
        claim=claim,
        shared_tokens=thousands * 512,
        prompts_each=40,
        individually=True,
    )


SETTINGS = (
    Setting(
        name="arxiv",
        prompt_tokens=8088,
        output_tokens=229,
        lowest=0.5,
        published={SPLIT: 3.0, EVEN: 1.5, VLLM: 2.5},
        claim="1.2×",
    ),
    # Documents of 37 full blocks with eight questions each: 87% of all tokens are repeated.
    Setting(
        name="l-eval",
        prompt_tokens=19_019,
        output_tokens=72,
        lowest=0.1,
        published={SPLIT: 0.8, EVEN: 1.0, VLLM: 0.5},
        claim="1.4×",
        shared_tokens=37 * BLOCK_TOKENS,
        prompts_each=8,
    ),
    _simulated(16, "6.25×", 0.1, 1.25, 1.0, 0.2),
    _simulated(32, "≥3×", 0.1, 0.6, 0.6, 0.2),
    _simulated(64, "1.5×", 0.05, 0.3, 0.3, 0.2),
    _simulated(128, "≥1.17×", 0.02, 0.14, 0.12, 0.12),
)


def requests(setting: Setting, rate: float, count: int, seed: int = 0) -> list[Request]:
    """Return `count` requests at `rate` requests per second; equal arguments give equal requests."""
    groups = _groups(setting.prompts_each, count, seed)
    shared = setting.shared_tokens // BLOCK_TOKENS
    whole = setting.prompt_tokens // BLOCK_TOKENS if shared else 0
    times = arrival_times("poisson", rate, seed)
    return [
        Request(
            id=str(number),
            arrival_s=time_s,
            prompt_tokens=setting.prompt_tokens,
            output_tokens=setting.output_tokens,
            prefix_blocks=tuple(chain(_names(group, 0, shared), _names(count + number, shared, whole))),
        )
        for number, (group, time_s) in enumerate(zip(groups, times, strict=False))
    ]


def _groups(prompts_each: int, count: int, seed: int) -> list[int]:
    chance, groups, begun = random.Random(seed), [], 0
    for _ in range(count):
        if not begun or chance.random() * prompts_each < 1.0:
            groups.append(begun)
            begun += 1
        else:
            groups.append(chance.randrange(max(0, begun - _RECENT), begun))
    return groups


def _names(prompt: int, start: int, stop: int) -> range:
    return range(prompt * _FAR + start, prompt * _FAR + stop)
