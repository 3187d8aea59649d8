"""From request fields to how the next token is picked."""

import secrets

from twofold.errors import RequestError
from twofold.request import SamplingParams
from twofold.serving.gateway.schemas import GenerationFields
from twofold.serving.service import ServedModel

SEED_BITS = 63
_SEED_MASK = (1 << SEED_BITS) - 1


def sampling_of(
    fields: GenerationFields, model: ServedModel, *, max_tokens: int, logprobs: int | None
) -> SamplingParams:
    """Raises RequestError where a value fits its type but not the model or another field."""
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens: {min_tokens} is more than the {max_tokens} tokens that may be generated",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        # Keeping more tokens than there are is keeping all of them.
        top_k=min(max(fields.top_k or 0, 0), model.vocab_size),
        min_tokens=min_tokens,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=stop_token_ids_of(fields, model),
        logprobs=logprobs,
    )


def stop_token_ids_of(fields: GenerationFields, model: ServedModel) -> tuple[int, ...]:
    for token_id in fields.stop_token_ids or ():
        if token_id >= model.vocab_size:
            raise RequestError(
                f"stop_token_ids: {token_id} is not in the vocabulary of {model.vocab_size} tokens",
                param="stop_token_ids",
            )
    return tuple(fields.stop_token_ids or ())


def base_seed(seed: int | None) -> int:
    """The seed of choice 0 of a prompt: the user's, or a random one where the user gave none."""
    return secrets.randbits(SEED_BITS) if seed is None else seed & _SEED_MASK


def choice_seed(base: int, choice: int) -> int:
    """The seed of choice `choice` of a prompt; stays within 63 bits, so a negative seed is a large one."""
    return (base + choice) & _SEED_MASK
