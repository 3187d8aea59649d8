"""From the `prompt` field to token ids."""

from collections.abc import Sequence

from twofold.errors import RequestError
from twofold.serving.gateway.gateway import Gateway
from twofold.serving.gateway.schemas import Prompt


async def encode_prompts(
    gateway: Gateway, prompts: Sequence[str | list[int]], *, add_special_tokens: bool
) -> list[list[int]]:
    """One list of token ids per prompt; raises RequestError where any of them cannot be used."""
    texts = [each for each in prompts if isinstance(each, str)]
    if texts:
        encoded = await encode_texts(gateway, texts, add_special_tokens=add_special_tokens)
    else:
        encoded = [check_token_ids(gateway, each) for each in prompts if isinstance(each, list)]
    for token_ids in encoded:
        check_tokens(gateway, len(token_ids), "prompt")
    return encoded


def split_prompts(prompt: Prompt) -> list[str | list[int]]:
    """The prompts in the field, which is a text, a list of token ids or a list of either: all of one kind."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt: the list is empty; send at least one prompt", param="prompt")
    ids = [each for each in prompt if isinstance(each, int)]
    if len(ids) == len(prompt):
        return [ids]
    texts_or_lists = [each for each in prompt if not isinstance(each, int)]
    if len(texts_or_lists) == len(prompt) and len({type(each) for each in prompt}) == 1:
        return texts_or_lists
    raise RequestError(
        "prompt: the list mixes kinds; send all strings, all token ids or all lists of token ids",
        param="prompt",
    )


async def encode_texts(
    gateway: Gateway, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    tokenizer = gateway.require_tokenizer("prompt")
    for text in texts:
        check_length(gateway, len(text), "prompt")
    encoded = await tokenizer.encode(texts, add_special_tokens=add_special_tokens)
    if all(encoded):
        return encoded
    if tokenizer.bos_token_id is None:
        raise RequestError(
            "prompt: a text is empty, and this model has no token that begins one", param="prompt"
        )
    return [token_ids or [tokenizer.bos_token_id] for token_ids in encoded]


def check_length(gateway: Gateway, characters: int, field: str) -> None:
    """Refuse what is too long, or cannot fit however it is tokenized, before the time for that is spent."""
    most = gateway.limits.prompt_characters
    if most is not None and characters > most:
        raise RequestError(
            f"{field}: {characters} characters are more than the limit of {most}",
            param=field,
            code="prompt_too_long",
        )
    context = gateway.service.model.max_model_len
    tokens = characters // gateway.require_tokenizer(field).longest_token
    if tokens > context:
        raise RequestError(
            f"{field}: {characters} characters are at least {tokens} tokens, "
            f"but the context length of this model is {context} tokens",
            param=field,
            code="context_length_exceeded",
        )


def check_tokens(gateway: Gateway, tokens: int, field: str) -> None:
    """Refuse a prompt over the limit, if there is one."""
    most = gateway.limits.prompt_tokens
    if most is not None and tokens > most:
        raise RequestError(
            f"{field}: {tokens} tokens are more than the limit of {most}", param=field, code="prompt_too_long"
        )


def check_token_ids(gateway: Gateway, token_ids: list[int]) -> list[int]:
    if not token_ids:
        raise RequestError("prompt: a list of token ids is empty; send at least one token", param="prompt")
    vocab_size = gateway.service.model.vocab_size
    if max(token_ids) >= vocab_size:
        raise RequestError(
            f"prompt: token id {max(token_ids)} is not in the vocabulary of {vocab_size} tokens",
            param="prompt",
        )
    return token_ids
