"""The endpoints `POST /tokenize` and `POST /detokenize`, in the form of vLLM."""

from fastapi.responses import Response
from starlette.requests import Request

from twofold.serving.gateway.endpoints.chat import encode_messages
from twofold.serving.gateway.endpoints.completions import encode_prompts
from twofold.serving.gateway.gateway import Gateway, read_struct
from twofold.serving.gateway.responses import Detokenized, Tokenized, json_response
from twofold.serving.gateway.schemas import ChatFields, DetokenizeFields, TokenizeFields, invalid
from twofold.serving.gateway.tokenizer import off_loop
from twofold.serving.gateway.tools.forced_calls import offered_tools, template_tools


async def tokenize(gateway: Gateway, request: Request) -> Response:
    """Answer `POST /tokenize` with the token ids of a prompt or of chat messages. Raises RequestError."""
    fields = await read_struct(request, TokenizeFields, gateway.bodies)
    gateway.check_model(fields.model or gateway.service.model.name)
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("prompt", "send either a prompt or messages")
    if fields.messages is not None:
        gateway.check_chat([each.content for each in fields.messages], fields.tools, "messages")
        chat = ChatFields(
            model=gateway.service.model.name,
            messages=fields.messages,
            tools=fields.tools,
            add_generation_prompt=fields.add_generation_prompt,
            add_special_tokens=fields.add_special_tokens,
            chat_template_kwargs=fields.chat_template_kwargs,
        )
        token_ids = await encode_messages(gateway, chat, template_tools(offered_tools(chat)))
    else:
        special = fields.add_special_tokens is not False
        (token_ids,) = await encode_prompts(gateway, [fields.prompt or ""], add_special_tokens=special)
    name_of, strings = gateway.require_tokenizer("prompt").bytes.name_of, None
    if fields.return_token_strs:
        strings = await off_loop(len(token_ids), lambda: list(map(name_of, token_ids)))
    answer = Tokenized(
        count=len(token_ids), max_model_len=gateway.service.model.max_model_len, tokens=token_ids, token_strs=strings
    )
    return json_response(answer)


async def detokenize(gateway: Gateway, request: Request) -> Response:
    """Answer `POST /detokenize` with the text of token ids. Raises RequestError."""
    fields = await read_struct(request, DetokenizeFields, gateway.bodies)
    gateway.check_model(fields.model or gateway.service.model.name)
    gateway.check_context(len(fields.tokens), "tokens")
    vocab_size = gateway.service.model.vocab_size
    if max(fields.tokens, default=0) >= vocab_size:
        raise invalid("tokens", f"{max(fields.tokens)} is not in the vocabulary of {vocab_size} tokens")
    tokenizer = gateway.require_tokenizer("tokens")
    text = await off_loop(len(fields.tokens), lambda: tokenizer.decode(fields.tokens, skip_special_tokens=False))
    return json_response(Detokenized(prompt=text))
