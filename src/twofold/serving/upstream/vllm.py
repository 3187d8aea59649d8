"""vLLM servers: completions with token ids (vLLM 0.32), hand-offs by NixlConnector. Base of other kinds of servers."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import msgspec

from twofold.request import ConstraintKind, Generation
from twofold.serving.upstream.client import VllmClient
from twofold.serving.upstream.metrics import ServerMetrics, read_metrics

_SAMPLING: tuple[str, ...] = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p")
_SAMPLING += ("repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos", "stop_token_ids")
_sampling_values = attrgetter(*_SAMPLING)


class VllmKind:
    """How requests are written for vLLM servers, and how their state is read."""

    returns_ids = True  # of the tokens of prompt and output
    splits = True  # into prefill and decode
    concurrent = False  # whether both phases get a request at the same time

    def fields(self, generation: Generation, model: str, seed: int) -> dict[str, Any]:
        """Return the JSON fields of a completion request. Raises RejectedError if such servers cannot run it."""
        # All sampling fields are sent, because the defaults in `generation_config.json` may differ between servers.
        sampling, prompt = generation.sampling, generation.prompt_text
        fields: dict[str, Any] = {
            **generation.server_fields,
            "model": model,
            "request_id": generation.request.id,
            "prompt": generation.prompt_token_ids if prompt is None else msgspec.Raw(prompt.json),
            **dict(zip(_SAMPLING, _sampling_values(sampling), strict=True)),
            "return_token_ids": True,
        }
        if prompt is not None:
            fields["add_special_tokens"] = prompt.add_special_tokens
            fields["skip_special_tokens"] = prompt.skip_special_tokens
        if not sampling.greedy:
            fields["seed"] = seed
        if sampling.logit_bias:
            fields["logit_bias"] = dict(sampling.logit_bias)
        if sampling.bad_words:
            fields["bad_words"] = sampling.bad_words
        if sampling.logprobs is not None:
            fields["logprobs"] = sampling.logprobs
            fields["return_tokens_as_token_ids"] = True
        constraint = sampling.constraint
        if constraint is not None:
            lists = constraint.kind is ConstraintKind.CHOICE
            text = constraint.text
            kind = ConstraintKind.GRAMMAR if constraint.kind is ConstraintKind.LARK else constraint.kind
            fields["structured_outputs"] = {kind: msgspec.json.decode(text) if lists else text}
        if generation.cache_salt:
            fields["cache_salt"] = generation.cache_salt
        return fields

    async def metrics(self, client: VllmClient, timeout_s: float) -> ServerMetrics:
        """Return the load of a healthy server. Raises UnavailableError."""
        await client.get("/health", timeout_s)
        return read_metrics(await client.metrics(timeout_s))

    async def handshake(self, client: VllmClient, timeout_s: float) -> Mapping[str, object]:
        """Return the fields by which a decode server finds the prefill server `client`. Raises UnavailableError."""
        del client, timeout_s
        return {}
