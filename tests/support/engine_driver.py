"""A driver that runs requests on an engine without a scheduler."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twofold.engine.base import Engine, Sampled, SequenceStep
from twofold.request import SamplingParams


@dataclass
class Driven:
    """A request that runs on an engine, with its blocks and the output generated so far."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    blocks: list[int]
    computed: int = 0
    output: list[Sampled] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + [sampled.token_id for sampled in self.output]

    @property
    def done(self) -> bool:
        return len(self.output) == self.sampling.max_tokens

    def step(self, chunk: int) -> SequenceStep:
        tokens = self.tokens
        end = min(len(tokens), self.computed + chunk)
        return SequenceStep(
            request_id=self.id,
            token_ids=tokens[self.computed : end],
            start=self.computed,
            block_table=self.blocks,
            sampling=self.sampling if end == len(tokens) else None,
            output_index=len(self.output),
        )


def drive(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    chunk: Callable[[], int] = lambda: 1 << 30,
    max_batch: int = 1 << 30,
    seed: int = 0,
    scatter: bool = True,
) -> list[list[Sampled]]:
    """Run prompts on an engine without a scheduler; return the output tokens of each."""
    rng = random.Random(seed)
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    free = list(range(engine.num_blocks))
    if scatter:
        rng.shuffle(free)
    requests = []
    for i, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
        count = -(-(len(prompt) + params.max_tokens) // engine.layout.block_size)
        blocks, free = free[:count], free[count:]
        assert len(blocks) == count, "too few blocks for the prompts"
        requests.append(Driven(str(i), list(prompt), params, blocks))
    while unfinished := [r for r in requests if not r.done]:
        batch = rng.sample(unfinished, min(max_batch, len(unfinished)))
        steps = [request.step(chunk()) for request in batch]
        for request, step, sampled in zip(batch, steps, engine.run(steps), strict=True):
            request.computed += len(step.token_ids)
            assert (sampled is None) == (step.sampling is None)
            if sampled is not None:
                request.output.append(sampled)
    return [request.output for request in requests]


def token_ids(outputs: Sequence[Sequence[Sampled]]) -> list[list[int]]:
    """Return the token ids of the outputs, without log probabilities."""
    return [[sampled.token_id for sampled in output] for output in outputs]
