"""`/tokenize` and `/detokenize`."""

import pytest

from serving.gateway.test_validation import refused
from support.running_gateway import running_gateway
from support.scripted_service import ScriptedService
from support.tokenizers_for_tests import byte_level, tool_caller

TEXT = "The quick brown fox, Grüße!"


def test_a_text_and_back(client):
    answer = client.post("/tokenize", json={"model": "tiny", "prompt": TEXT, "return_token_strs": True}).json()
    assert answer["tokens"] == byte_level().backend.encode(TEXT).ids
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 256)
    assert "".join(answer["token_strs"]).startswith("The quick brown fox, Gr")
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": TEXT}


def test_chat_messages_are_rendered():
    tools = [{"function": {"name": "get_time"}}]
    with running_gateway(ScriptedService(), tokenizer=tool_caller()) as client:
        body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
        tokens = client.post("/tokenize", json=body).json()["tokens"]
        prompt = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert "get_time" in prompt
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [401]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_wrong_bodies_are_refused(client, path, body, param):
    refused(client.post(path, json=body), param=param)


def test_another_model_is_404(client):
    refused(client.post("/tokenize", json={"model": "other", "prompt": "a"}), 404, "model")
