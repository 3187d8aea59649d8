"""From the `messages` field to what a chat template takes."""

from collections.abc import Sequence

from twofold.errors import RequestError
from twofold.serving.gateway.schemas import ContentPart, Message

# Most templates know only the older name: OpenAI renamed the system role to developer, with the same meaning.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
UNSUPPORTED_PARTS = ("tool_calls", "function_call", "audio", "refusal", "tool_call_id")


def template_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Plain role-and-content messages; raises RequestError on anything but text in a role of `ROLES`."""
    if not messages:
        raise RequestError("messages: the list is empty; send at least one message", param="messages")
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: Message, place: str) -> dict[str, str]:
    if message.role not in ROLES:
        raise RequestError(
            f"{place}.role: {message.role!r} is not supported; use one of {', '.join(ROLES)}",
            param=f"{place}.role",
        )
    for field in UNSUPPORTED_PARTS:
        if getattr(message, field) not in (None, [], {}):
            raise RequestError(f"{place}.{field}: not supported by this service", param=f"{place}.{field}")
    rendered = {"role": ROLES[message.role], "content": _text(message.content, f"{place}.content")}
    return rendered if message.name is None else {**rendered, "name": message.name}


def _text(content: str | list[ContentPart] | None, place: str) -> str:
    """The text; several parts become lines, as they do in vLLM."""
    if content is None:
        raise RequestError(f"{place}: it is missing; send a string or a list of text parts", param=place)
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{place}[{index}]") for index, part in enumerate(content))


def _part_text(part: ContentPart, place: str) -> str:
    if part.type != "text":
        raise RequestError(
            f"{place}.type: {part.type!r} is not supported; this service takes text only",
            param=f"{place}.type",
        )
    if part.text is None:
        raise RequestError(f"{place}.text: this field is required", param=f"{place}.text")
    return part.text
