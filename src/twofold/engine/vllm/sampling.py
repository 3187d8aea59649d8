"""Sampling for vLLM by seed and position, so that a replayed request gets the same tokens."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams as VllmSampling
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality
from vllm.v1.worker.gpu_input_batch import InputBatch

from twofold.engine.grammar import GrammarError, GrammarMatchers, is_allowed
from twofold.engine.torch.logits import SamplingRow
from twofold.engine.torch.sampler import pick
from twofold.request import Constraint, SamplingParams

SAMPLING = "twofold_sampling"  # key in a request's extra_args


class ConstrainedOutput:
    """The output of a constrained request. On each rank, it uses the `grammars` of that process."""

    grammars: ClassVar[GrammarMatchers]
    failures: ClassVar[dict[str, str]] = {}  # requests that must fail, with the reasons

    def __init__(self, request_id: str, constraint: Constraint) -> None:
        self._request_id, self._constraint = request_id, constraint

    def allowed(self, output: Sequence[int], drafts: int = 0) -> bytes | None:
        """Return the tokens that may follow, as `GrammarMatchers.allowed`.

        Return None after an error, and if the constraint excludes one of the last `drafts` tokens of the output.
        """
        grammars, request_id, constraint = self.grammars, self._request_id, self._constraint
        try:
            for end in range(len(output) - drafts, len(output)):
                if not is_allowed(grammars.allowed(request_id, constraint, output[:end]), output[end]):
                    return None
            return grammars.allowed(request_id, constraint, output)
        except GrammarError as error:
            self.failures[self._request_id] = f"the output cannot be constrained: {error}"
            return None


class SampledRequest:
    """A request that may get another token than the one with the highest logit of the model."""

    def __init__(self, extra: dict[str, Any], prompt: list[int], output: list[int]) -> None:
        self._sampling: SamplingParams = extra["sampling"]
        self._given: int = extra["prompt_tokens"]
        self._constrained: ConstrainedOutput | None = extra["constrained"]
        self.eos_token_ids: tuple[int, ...] = extra["eos_token_ids"]
        self._prompt, self._output = prompt, output  # vLLM appends the output tokens to the second list

    def draw(self, logits: torch.Tensor, drafts: Sequence[int] = ()) -> int:
        """Return the token after the output and `drafts`; its logits, [1, vocabulary], become a greedy choice's."""
        position = len(self._prompt) + len(self._output) + len(drafts)
        history = [*self._prompt, *self._output, *drafts] if self._sampling.needs_history else ()
        row = SamplingRow(self._sampling, position, position - self._given, history)
        if self._constrained is not None:
            row = replace(row, allowed=self._constrained.allowed(row.output, len(drafts)))
        token = pick(logits, [row], self.eos_token_ids)[0]
        logits[0] = float("-inf")
        logits[0, token] = 0.0
        return token


# vLLM's random generator depends on earlier requests, so vLLM decodes greedily, and this logits processor masks all
# tokens except the sampled one.
class KeyedSampling(LogitsProcessor):
    """vLLM logits processor that samples a token and masks the remaining tokens.

    The processor handles requests that `is_keyed` selects. The random numbers depend only on the seed and the token
    position.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, SampledRequest] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        rows = self._rows
        for index in batch_update.removed:
            rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            rows.pop(index, None)
            extra = (params.extra_args or {}).get(SAMPLING)
            if extra is not None:
                rows[index] = SampledRequest(extra, prompt or [], output)
        for one, other, direction in batch_update.moved:
            moved, replaced = rows.pop(one, None), rows.pop(other, None)
            if moved is not None:
                rows[other] = moved
            if replaced is not None and direction is MoveDirectionality.SWAP:
                rows[one] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, drawn in self._rows.items():
            drawn.draw(logits[index : index + 1])
        return logits


# vLLM accepts drafts while they equal the tokens with the highest logits, so seeds give the same tokens as without
# drafts. Its rejection sampler passes the logits of drafts to no processors other than this parent class.
class KeyedDraftSampling(KeyedSampling, MinTokensLogitsProcessor):
    """`KeyedSampling` for speculative decoding."""

    def __init__(self, batch: InputBatch) -> None:
        self._rows = {}
        self._drafts = batch.spec_token_ids

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Sample the tokens that follow all drafts. `logits` has a row for each request."""
        for index, drawn in self._rows.items():
            drawn.draw(logits[index : index + 1], self._drafts[index])
        return logits

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: list[int]) -> torch.Tensor:
        """Sample the tokens in place of drafts. `logits` has a row for each draft of each request."""
        starts = list(accumulate(num_draft_tokens, initial=0))
        for index, drawn in self._rows.items():
            drafts, start = self._drafts[index], starts[index]
            for place in range(num_draft_tokens[index]):
                row = start + place
                if drawn.draw(logits[row : row + 1], drafts[:place]) != drafts[place]:
                    break  # vLLM rejects this draft and all later ones
        return logits


def sample_drafts_by_key(worker: Any) -> None:
    """Add `KeyedDraftSampling` to a worker of vLLM."""
    batch: InputBatch = worker.model_runner.input_batch
    batch.logitsprocs.non_argmax_invariant.append(KeyedDraftSampling(batch))
    batch.logitsprocs_need_output_token_ids = True


def is_keyed(sampling: SamplingParams) -> bool:
    """Return whether a request's tokens may differ from those with the model's highest logits."""
    plain = sampling.greedy and not sampling.min_tokens and not sampling.logit_bias
    return not plain or sampling.needs_history


def vllm_sampling(
    sampling: SamplingParams,
    prompt_tokens: int,
    max_tokens: int,
    eos_token_ids: frozenset[int],
    constrained: ConstrainedOutput | None = None,
) -> VllmSampling:
    """Return vLLM's sampling parameters for a request."""
    extra = None  # input of `KeyedSampling`
    # `prompt_tokens` is the request's prompt length; vLLM's prompt may also contain output from another worker.
    if is_keyed(sampling):
        extra = {
            SAMPLING: {
                "sampling": sampling,
                "prompt_tokens": prompt_tokens,
                "eos_token_ids": tuple(eos_token_ids),
                "constrained": constrained,
            }
        }
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
    return VllmSampling(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,  # EOS ids are among the stop ids
        stop_token_ids=sorted(ends),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        extra_args=extra,
        detokenize=False,
    )
