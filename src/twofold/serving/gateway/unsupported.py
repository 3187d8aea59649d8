"""Fields this service cannot honour: any but their neutral values are refused, never ignored."""

import msgspec

from twofold.errors import RequestError


class UnsupportedFields(msgspec.Struct, frozen=True, kw_only=True):
    """They are read only to be refused where they would change the answer."""

    allowed_token_ids: object = None
    audio: object = None
    bad_words: object = None
    best_of: object = None
    chat_template: object = None
    continue_final_message: object = None
    documents: object = None
    echo: object = None
    frequency_penalty: object = None
    function_call: object = None
    functions: object = None
    guided_choice: object = None
    guided_grammar: object = None
    guided_json: object = None
    guided_regex: object = None
    length_penalty: object = None
    logit_bias: object = None
    logits_processors: object = None
    min_p: object = None
    modalities: object = None
    prediction: object = None
    presence_penalty: object = None
    prompt_embeds: object = None
    prompt_logprobs: object = None
    reasoning_effort: object = None
    repetition_penalty: object = None
    response_format: object = None
    structured_outputs: object = None
    suffix: object = None
    tool_choice: object = None
    tools: object = None
    truncate_prompt_tokens: object = None
    use_beam_search: object = None
    web_search_options: object = None


# Values, besides null, under which a field asks for nothing that is not done anyway.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "bad_words": ([],),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),  # with no functions both mean: write text
    "functions": ([],),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}


def refuse_unsupported(fields: UnsupportedFields, n: int) -> None:
    """Raise RequestError on the first field that asks for something this service does not do."""
    for name in UnsupportedFields.__struct_fields__:
        value = getattr(fields, name)
        neutral = (n,) if name == "best_of" else NEUTRAL.get(name, ())
        if value is None or any(_same(value, allowed) for allowed in neutral):
            continue
        allowed = " or ".join(["null", *(msgspec.json.encode(each).decode() for each in neutral)])
        raise RequestError(
            f"{name}: not supported by this service; leave it out or send {allowed}",
            param=name,
            code="unsupported_parameter",
        )


def _same(value: object, allowed: object) -> bool:
    """Equality as in JSON, where false is not 0."""
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed
