"""The endpoints under `/v1/responses`: OpenAI's Responses API over a chat."""

import secrets
from collections.abc import Iterator, Sequence

import msgspec
from fastapi.responses import Response
from starlette.requests import Request

from twofold.request import FinishReason
from twofold.serving.gateway.endpoints.chat import start_chat
from twofold.serving.gateway.endpoints.responses_input import ResponsesFields, chat_of, items_of, new_messages
from twofold.serving.gateway.gateway import Gateway, read_struct
from twofold.serving.gateway.generations import ResponseSpec
from twofold.serving.gateway.middleware import Arrival
from twofold.serving.gateway.output import Delta
from twofold.serving.gateway.response_store import StoredResponse
from twofold.serving.gateway.responses import MaybeUsage, Usage, error_response_for, json_response
from twofold.serving.gateway.schemas import CalledFunction, InputMessage, ToolCall
from twofold.serving.gateway.streaming import ResponseWriter, named_event, respond
from twofold.serving.gateway.tools.families import Json
from twofold.serving.gateway.tools.message_parser import CallDelta


async def create_response(gateway: Gateway, request: Request) -> Response:
    """Answer `POST /v1/responses`. Raises RequestError, InstanceLostError and ClientDisconnect."""
    fields = await read_struct(request, ResponsesFields, gateway.bodies)
    contents = [] if isinstance(fields.input, str) else [item.content for item in fields.input]
    gateway.check_chat(contents, fields.tools, "input")
    key, before = _key(request), fields.previous_response_id
    earlier: Sequence[InputMessage] = ()
    session = fields.prompt_cache_key or f"resp_{request.state.arrival.request_id}"
    if before is not None:
        found = gateway.responses.get(key, before, "previous_response_id", status=400)
        earlier, session = found.messages, fields.prompt_cache_key or found.session
    fields = msgspec.structs.replace(fields, prompt_cache_key=session)
    new = new_messages(fields)
    chat = chat_of(fields, [*earlier, *new])
    spec, prompt = await start_chat(gateway, request, chat)
    writer = ResponsesWriter(gateway, key, spec, fields, earlier, new)
    return await respond(gateway, request, chat, spec, [prompt], writer)


async def get_response(gateway: Gateway, request: Request) -> Response:
    """Answer `GET /v1/responses/{id}`."""
    return json_response(gateway.responses.get(_key(request), request.path_params["id"], "response_id").body)


async def get_input(gateway: Gateway, request: Request) -> Response:
    """Answer `GET /v1/responses/{id}/input_items`."""
    items = gateway.responses.get(_key(request), request.path_params["id"], "response_id").input
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": list(items), "has_more": False} | ends)


async def delete_response(gateway: Gateway, request: Request) -> Response:
    """Answer `DELETE /v1/responses/{id}`."""
    response_id = request.path_params["id"]
    gateway.responses.delete(_key(request), response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _key(request: Request) -> str:
    arrival: Arrival = request.state.arrival
    return arrival.key_name


class ResponsesWriter(ResponseWriter):
    """Formats the response bodies and stream events of the Responses API, and stores complete responses."""

    def __init__(
        self,
        gateway: Gateway,
        key: str,
        spec: ResponseSpec,
        fields: ResponsesFields,
        earlier: Sequence[InputMessage],
        new: Sequence[InputMessage],
    ) -> None:
        self._store, self._key, self._spec, self._fields = gateway.responses, key, spec, fields
        self._earlier, self._new = earlier, new  # messages of earlier responses, and of this request
        self._id = spec.id.replace("chatcmpl-", "resp_", 1)
        self._output: list[Json] = []  # complete items
        self._open: Json | None = None  # the item that the output is in
        self._reasoning_tokens = self._events_sent = 0

    def events(self, delta: Delta, usage: MaybeUsage) -> bytes:
        assert isinstance(usage, Usage)  # noqa: S101  (the request asks for the usage in every event)
        opening: list[Json] = []
        if not delta.token.index:
            opening = [{"type": f"response.{state}", "response": self._body("in_progress")} for state in _STATES]
        closing: list[Json] = []
        items = list(self._items(delta))
        if delta.finish_reason is not None:
            body = self._ended(delta, usage)
            closing = [{"type": f"response.{body['status']}", "response": body}]
        return b"".join(map(self._event, [*opening, *items, *closing]))

    def error_event(self, error: Exception) -> bytes:
        detail = msgspec.json.decode(error_response_for(error).body)["error"]
        return self._event({"type": "error", **{name: detail[name] for name in ("code", "message", "param")}})

    def response(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> Json:
        (deltas,) = choices
        for delta in deltas:
            for _ in self._items(delta):
                pass
        return self._ended(deltas[-1], usage)

    # -- output -------------------------------------------------------------------------------------------------------

    def _items(self, delta: Delta) -> Iterator[Json]:
        """Add the output of one token to the items, and yield the events of this."""
        self._reasoning_tokens += bool(delta.reasoning)
        if delta.reasoning:
            yield from self._add("reasoning", "rs", delta.reasoning)
        if delta.text:
            yield from self._add("message", "msg", delta.text)
        for call in delta.calls:
            yield from self._call(call)
        if delta.finish_reason is not None:
            yield from self._close("incomplete" if delta.finish_reason is FinishReason.LENGTH else "completed")

    def _add(self, kind: str, prefix: str, text: str) -> Iterator[Json]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            item: Json = {"type": kind, "id": f"{prefix}_{secrets.token_hex(16)}", "status": "in_progress"}
            extra: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            item |= extra
            yield self._place("response.output_item.added", item=item | {"content": []})
            self._open = item | {"content": [_part(kind, "")]}
            yield self._place("response.content_part.added", item_id=item["id"], content_index=0, part=_part(kind, ""))
        self._open["content"][0]["text"] += text
        logprobs: Json = {"logprobs": []} if kind == "message" else {}
        yield self._place(
            f"response.{_PARTS[kind]}.delta", item_id=self._open["id"], content_index=0, delta=text, **logprobs
        )

    def _call(self, call: CallDelta) -> Iterator[Json]:
        if call.name:
            yield from self._close()
            self._open = {"type": "function_call", "id": f"fc_{secrets.token_hex(16)}", "status": "in_progress"}
            self._open |= {"call_id": call.id, "name": call.name, "arguments": ""}
            yield self._place("response.output_item.added", item=dict(self._open))
        assert self._open is not None  # noqa: S101  (the first part of a call has its name)
        self._open["arguments"] += call.arguments
        yield self._place(f"{_ARGUMENTS}.delta", item_id=self._open["id"], delta=call.arguments)

    def _close(self, status: str = "completed") -> Iterator[Json]:
        item, self._open = self._open, None
        if item is None:
            return
        kind, here = item["type"], {"item_id": item["id"]}
        if kind == "function_call":
            yield self._place(f"{_ARGUMENTS}.done", **here, name=item["name"], arguments=item["arguments"])
        else:
            part, here = item["content"][0], here | {"content_index": 0}
            logprobs: Json = {"logprobs": []} if kind == "message" else {}
            yield self._place(f"response.{_PARTS[kind]}.done", **here, text=part["text"], **logprobs)
            yield self._place("response.content_part.done", **here, part=dict(part))
        item["status"] = status
        yield self._place("response.output_item.done", item=dict(item))
        self._output.append(item)

    def _place(self, kind: str, **fields: object) -> Json:
        return {"type": kind, "output_index": len(self._output), **fields}

    def _event(self, body: Json) -> bytes:
        body["sequence_number"] = self._events_sent
        self._events_sent += 1
        return named_event(body)

    # -- bodies -------------------------------------------------------------------------------------------------------

    def _ended(self, delta: Delta, usage: Usage) -> Json:
        cut = delta.finish_reason is FinishReason.LENGTH
        body = self._body("incomplete" if cut else "completed", usage)
        fields = self._fields
        if fields.store is not False:
            new = [*self._new, _answer(self._output)]
            items = [{"id": f"item_{secrets.token_hex(16)}"} | item for item in items_of(fields)]
            size = len(msgspec.json.encode([body, new, items]))
            session = fields.prompt_cache_key or ""
            self._store.put(self._key, StoredResponse(body, [*self._earlier, *new], items, session, size))
        return body

    def _body(self, status: str, usage: Usage | None = None) -> Json:
        fields = self._fields
        text, reasoning = fields.text, fields.reasoning
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._spec.arrival.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata or {},
            "model": fields.model,
            "output": list(self._output),
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "previous_response_id": fields.previous_response_id,
            "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
            "store": fields.store is not False,
            "temperature": 1.0 if fields.temperature is None else fields.temperature,
            "text": {"format": {"type": "text"}} if text is None or text.format is None else _builtins(text),
            "tool_choice": "auto" if fields.tool_choice is None else _builtins(fields.tool_choice),
            "tools": [_builtins(tool) for tool in fields.tools or []],
            "top_p": 1.0 if fields.top_p is None else fields.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else self._usage(usage),
        }

    def _usage(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }


_STATES = ("created", "in_progress")
_ARGUMENTS = "response.function_call_arguments"
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


def _part(kind: str, text: str) -> Json:
    extra: Json = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": _PARTS[kind], "text": text, **extra}


def _builtins(given: str | msgspec.Struct) -> Json | str:
    built: Json | str = msgspec.to_builtins(given)
    return built


def _answer(output: Sequence[Json]) -> InputMessage:
    """Return the output of a response as a message of the assistant."""
    texts = {kind: [i["content"][0]["text"] for i in output if i["type"] == kind] for kind in _PARTS}
    calls = [
        ToolCall(id=item["call_id"], function=CalledFunction(name=item["name"], arguments=item["arguments"]))
        for item in output
        if item["type"] == "function_call" and item["status"] == "completed"
    ]
    return InputMessage(
        role="assistant",
        content="".join(texts["message"]),
        reasoning_content="".join(texts["reasoning"]) or None,
        tool_calls=calls or None,
    )
