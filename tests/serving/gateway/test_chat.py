"""`/v1/chat/completions` over a real socket."""

from support.running_gateway import running_gateway
from support.scripted_service import EOS, ScriptedService, served_model
from support.tokenizers_for_tests import byte_level

HELLO = [{"role": "user", "content": "Hello"}]


def prompt_text(service, number=0):
    return byte_level().decode(service.started[number].prompt_token_ids, skip_special_tokens=False)


def ask(client, messages, **fields):
    return client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, **fields})


def test_answer_has_openais_form(chat):
    answer = chat().json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert choice["message"]["role"] == "assistant"
    # The request sets no token limit, so the answer fills the context.
    assert answer["usage"]["total_tokens"] == 256


def test_stream_equals_the_whole_answer(chat, events):
    """The deltas of a stream, joined, equal the answer without streaming."""
    fields = {"max_completion_tokens": 50, "max_tokens": 9, "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 3}
    whole = chat(**fields).json()
    *chunks, usage, done = events(chat(**fields, stream=True, stream_options={"include_usage": True}))
    assert (done, usage["choices"], usage["usage"]) == ("[DONE]", [], whole["usage"])
    assert whole["usage"]["completion_tokens"] == 100
    for choice in whole["choices"]:
        first, *rest = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in part["delta"] for part in rest)
        assert "".join(part["delta"]["content"] for part in rest) == choice["message"]["content"]
        assert rest[-1]["finish_reason"] == choice["finish_reason"]
        content = [entry for part in rest for entry in part["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"]
        assert all(len(entry["top_logprobs"]) == 3 for entry in content)


def test_logprob_bytes_join_to_the_text():
    """The bytes are exact even for tokens that hold part of a character."""
    said = byte_level().backend.encode("café 😀 世界").ids
    with running_gateway(ScriptedService(lambda _: [*said, EOS])) as client:
        choice = ask(client, HELLO, logprobs=True).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert choice["message"]["content"] == "café 😀 世界"
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]).decode() == "café 😀 世界"
    assert bytes(entries[-1]["bytes"]) == b"</s>"
    assert all(entry["top_logprobs"] == [] for entry in entries)


def test_prompt_follows_the_chat_template():
    """Special tokens in the template are encoded as special tokens."""
    service = ScriptedService()
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]},
        {"role": "assistant", "content": "Three", "refusal": None, "tool_calls": None, "audio": None},
    ]
    with running_gateway(service) as client:
        assert ask(client, messages, max_tokens=1).status_code == 200
        ask(client, HELLO, max_tokens=1, add_generation_prompt=False, chat_template_kwargs={"shout": True})
    assert prompt_text(service) == "<|system|>Be brief.</s><|user|>One\nTwo</s><|assistant|>Three</s><|assistant|>"
    assert prompt_text(service, 1) == "<|user|>Hello</s>!"
    assert EOS in service.started[0].prompt_token_ids


def test_long_prompts_are_tokenized_in_a_thread():
    service = ScriptedService(model=served_model(max_model_len=50000))
    text = "The quick brown fox. " * 1000
    with running_gateway(service) as client:
        assert ask(client, [{"role": "user", "content": text}], max_tokens=1).status_code == 200
    assert text in prompt_text(service)
