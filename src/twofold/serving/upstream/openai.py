"""Servers of any engine with OpenAI's completions API, such as llama.cpp, Ollama and TensorRT-LLM.

They take and return text. Fields beyond OpenAI's are sent only where a request sets them.
"""

from typing import Any

import msgspec

from twofold.request import ConstraintKind, Generation, SamplingParams
from twofold.serving.upstream.client import RejectedError, VllmClient
from twofold.serving.upstream.metrics import ServerMetrics
from twofold.serving.upstream.vllm import Decode, VllmKind

_UNKNOWN = (
    "request_id return_token_ids return_tokens_as_token_ids add_special_tokens skip_special_tokens cache_salt "
    "structured_outputs"
)
_NEUTRAL = SamplingParams(max_tokens=0)
_SENT_IF_SET = ("min_tokens", "top_k", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids")


class OpenAIKind(VllmKind):
    """How requests are written for servers that have OpenAI's API alone."""

    returns_ids = splits = False
    health = "/v1/models"

    def fields(self, generation: Generation, model: str, seed: int, decode: Decode | None) -> dict[str, Any]:
        fields = super().fields(generation, model, seed, decode)
        if generation.prompt_text is None:
            if decode is None:
                raise RejectedError(400, "prompt: the server takes text, and this model has no tokenizer to decode ids")
            fields["prompt"] = decode(generation.prompt_token_ids)
        unset = (name for name in _SENT_IF_SET if fields[name] == getattr(_NEUTRAL, name))
        for name in (*_UNKNOWN.split(), *unset):
            fields.pop(name, None)
        constraint = generation.sampling.constraint
        if constraint is not None:
            if constraint.kind is not ConstraintKind.JSON:
                raise RejectedError(400, f"{constraint.kind.value}: the server takes no constraint but JSON schemas")
            schema = {"name": "answer", "schema": msgspec.Raw(constraint.text.encode()), "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    async def metrics(self, client: VllmClient, timeout_s: float) -> ServerMetrics:
        del client, timeout_s
        return ServerMetrics()
