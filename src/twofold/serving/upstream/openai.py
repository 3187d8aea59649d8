"""Servers of any engine with OpenAI's completions API, such as llama.cpp, Ollama and TensorRT-LLM.

They take and return text. Fields beyond OpenAI's are sent only where a request sets them. Requests for token ids, log
probabilities or structured output do not get here: a server gets them as they are.
"""

from typing import Any

from twofold.request import Generation, SamplingParams
from twofold.serving.upstream.client import RejectedError, StatusError, VllmClient
from twofold.serving.upstream.metrics import ServerMetrics
from twofold.serving.upstream.vllm import VllmKind

_UNKNOWN = "request_id return_token_ids add_special_tokens skip_special_tokens cache_salt"
_SENT_IF_SET = ("min_tokens", "top_k", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids")


class OpenAIKind(VllmKind):
    """How requests are written for servers that have OpenAI's API alone."""

    returns_ids = splits = False

    def fields(self, generation: Generation, model: str, seed: int) -> dict[str, Any]:
        fields = super().fields(generation, model, seed)
        if generation.prompt_text is None:
            raise RejectedError(400, "prompt: send text, because a server behind this gateway takes no token ids")
        unset = (name for name in _SENT_IF_SET if fields[name] == getattr(SamplingParams(max_tokens=0), name))
        for name in (*_UNKNOWN.split(), *unset):
            fields.pop(name, None)
        return fields

    async def metrics(self, client: VllmClient, timeout_s: float) -> ServerMetrics:
        try:
            await client.get("/health", timeout_s)
        except StatusError as error:
            if error.status != 404:  # of llama-cpp-python, which ends an output when it lists its model
                raise
        return ServerMetrics()
