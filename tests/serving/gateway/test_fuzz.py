"""Invalid request bodies never cause a 500."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from twofold.serving.gateway.schemas import ChatFields, CompletionFields

values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=6,
)
common = {"temperature": st.floats(0, 2), "n": st.integers(1, 3), "stop": st.text(max_size=3), "seed": st.integers()}
tame = {
    "/v1/completions": {"prompt": st.text(max_size=9) | st.lists(st.integers(0, 420), max_size=4), **common},
    "/v1/chat/completions": {
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.text()}), max_size=2
        ),
        "max_tokens": st.integers(-1, 9),
        **common,
    },
}
names = {"/v1/completions": CompletionFields.__struct_fields__, "/v1/chat/completions": ChatFields.__struct_fields__}


@given(st.data())
@settings(max_examples=150)
def test_any_fields(client, data):
    """Bodies with known field names and values of any type get a 200, 400 or 404."""
    path = data.draw(st.sampled_from(sorted(names)))
    body = {"model": "tiny", **data.draw(st.fixed_dictionaries({}, optional=tame[path]))}
    body |= data.draw(st.dictionaries(st.sampled_from(names[path]), values, max_size=2))
    response = client.post(path, content=json.dumps(body))
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@given(st.binary(max_size=50))
@settings(max_examples=50)
def test_any_bytes(client, body):
    """Bodies of random bytes get a 400."""
    assert client.post("/v1/completions", content=body).status_code == 400
