"""SGLang servers (0.5.23): the same completions API, with other names, and hand-offs by its bootstrap servers.

The prefill and the decode server get a request at the same time. Both carry the address of the prefill server's
bootstrap server and a random room, in which the decode server announces its memory. The decode server's output begins
with the token of the prefill server, which arrives with the KV cache (`sglang/srt/disaggregation`).
"""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from twofold.request import ConstraintKind, Generation
from twofold.serving.upstream.client import RejectedError, StatusError, UnavailableError, VllmClient
from twofold.serving.upstream.metrics import ServerMetrics, metric_sums
from twofold.serving.upstream.vllm import VllmKind

_CONSTRAINTS = {ConstraintKind.JSON: "json_schema", ConstraintKind.REGEX: "regex", ConstraintKind.GRAMMAR: "ebnf"}


class _ServerInfo(msgspec.Struct, frozen=True):
    disaggregation_mode: str = "null"
    disaggregation_bootstrap_port: int = 8998


class SglangKind(VllmKind):
    """How requests are written for SGLang servers."""

    concurrent = True

    def fields(self, generation: Generation, model: str, seed: int) -> dict[str, Any]:
        sampling = generation.sampling
        lark = sampling.constraint is not None and sampling.constraint.kind is ConstraintKind.LARK
        if lark or sampling.bad_words or sampling.logprobs:
            raise RejectedError(
                400, "SGLang has no bad_words, no Lark grammars and no token ids of top log probabilities"
            )
        fields = super().fields(generation, model, seed)
        fields["rid"] = fields.pop("request_id")
        fields["top_k"] = sampling.top_k or -1
        for name in ("add_special_tokens", "return_tokens_as_token_ids", "structured_outputs"):
            fields.pop(name, None)
        constraint = sampling.constraint
        if constraint is not None and constraint.kind is ConstraintKind.CHOICE:
            fields["regex"] = "|".join(map(re.escape, msgspec.json.decode(constraint.text, type=list[str])))
        elif constraint is not None:
            fields[_CONSTRAINTS[constraint.kind]] = constraint.text
        return fields

    async def handshake(self, client: VllmClient, timeout_s: float) -> Mapping[str, object]:
        try:
            info = msgspec.json.decode(await client.get("/server_info", timeout_s), type=_ServerInfo)
        except msgspec.DecodeError as error:
            raise UnavailableError(f"{client.url}/server_info is not that of SGLang: {error}") from error
        if info.disaggregation_mode == "null":
            return {}
        return {"bootstrap_host": urlsplit(client.url).hostname, "bootstrap_port": info.disaggregation_bootstrap_port}

    async def metrics(self, client: VllmClient, timeout_s: float) -> ServerMetrics:
        await client.get("/health", timeout_s)
        try:
            text = await client.metrics(timeout_s)
        except StatusError:  # started without --enable-metrics
            return ServerMetrics()
        return sglang_metrics(text)


def sglang_metrics(text: str) -> ServerMetrics:
    """Parse SGLang's metrics in the Prometheus text format. A missing metric counts as 0."""
    sums = metric_sums("sglang", text)
    return ServerMetrics(
        steps=round(sums["prompt_tokens_total"] + sums["generation_tokens_total"]),
        running=round(sums["num_running_reqs"]),
        waiting=round(sums["num_queue_reqs"]),
        blocks=round(sums["max_total_num_tokens"]),
        used=min(1.0, sums["token_usage"]),
    )
