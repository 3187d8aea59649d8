"""Mailboxes between processes: message order, malformed frames, encryption."""

import logging
import socket
from contextlib import suppress

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from twofold.request import Generation, Request, SamplingParams, TokenOutput
from twofold.scheduling.instance.status import InstanceStatus
from twofold.security.guard import Guard
from twofold.security.key import ClusterKey
from twofold.serving.controller import mailbox
from twofold.serving.controller.mailbox import Inbox, Outbox, Stamp, new_context
from twofold.serving.messages import (
    Abort,
    HandoffEnded,
    Message,
    Prefill,
    Reserve,
    StepDone,
    StoreChanged,
    StoreFetch,
    ToController,
    ToWorker,
)

REQUEST = Request(id="r", arrival_s=1.5, prompt_tokens=3, output_tokens=2)
SAMPLING = SamplingParams(max_tokens=2)
STATUS = msgspec.convert(dict.fromkeys(InstanceStatus.__struct_fields__, 0), InstanceStatus)
RESERVE = Reserve(request=REQUEST, sampling=SAMPLING, source="p")
MESSAGES: list[Message] = [
    Prefill(generation=Generation(request=REQUEST, prompt_token_ids=[1, 2, 3], sampling=SAMPLING), target="d"),
    Prefill(
        generation=Generation(request=REQUEST, prompt_token_ids=[1, 2, 3], sampling=SAMPLING),
        fetch=StoreFetch(host="far", address="tcp://10.0.0.2:5555", blocks=7),
    ),
    StoreChanged(host="far", epoch=4, stored=[b"\x00" * 16], removed=[], address="tcp://10.0.0.2:5555"),
    RESERVE,
    HandoffEnded(request_id="r", epoch=2**52, tokens=[7]),
    StepDone(
        instance="p",
        epoch=3,
        started_s=0.5,
        started=["r"],
        tokens=[("r", TokenOutput(index=0, token_id=7, top_logprobs=((7, -0.5),)))],
        status=STATUS,
        number=1,
    ),
]
LAST = Abort(request_id="the last")
SECRET = b"do not repeat this"


class Post:
    """An inbox, an outbox, and a raw socket that can send arbitrary bytes to the inbox."""

    def __init__(self, address, **options):
        self.context = zmq.Context()
        self.inbox = Inbox(self.context, address, ToWorker | ToController, **options)
        self.outbox = Outbox(self.context)
        self.raw = self.context.socket(zmq.PUSH)
        self.raw.connect(address)

    def received(self, *frames):
        """Send `frames`; return the messages that arrive in the inbox."""
        for frame in frames:
            self.raw.send(frame)
        self.raw.send(encode(LAST))
        messages = []
        for _ in range(300):  # a poll may return dropped frames only
            messages += self.inbox.receive(1.0)
            if messages and messages[-1] == LAST:
                return messages[:-1]
        raise AssertionError("the last message did not come")

    def close(self):
        self.raw.close(linger=0)
        self.outbox.close()
        self.inbox.close()
        self.context.term()


def encode(message):
    return msgspec.msgpack.encode(message)


def read(frame):
    """Return the message that a frame contains, or None if the frame is malformed."""
    try:
        return msgspec.msgpack.decode(frame, type=ToWorker | ToController)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


@pytest.fixture(scope="module")
def post(tmp_path_factory):
    made = Post(f"ipc://{tmp_path_factory.mktemp('post')}/inbox.sock")
    yield made
    made.close()


@st.composite
def mutated(draw):
    """Hypothesis strategy for corrupted message frames."""
    frame = bytearray(encode(draw(st.sampled_from(MESSAGES))))
    lengths = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91" * 3000]
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(frame)))
        end = min(len(frame), start + draw(st.integers(0, 8)))
        frame[start:end] = draw(st.binary(max_size=8) | st.sampled_from(lengths))
    return bytes(frame)


@given(st.lists(st.binary(max_size=60) | mutated() | st.sampled_from(MESSAGES).map(encode), max_size=8))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_malformed_frames_are_dropped_and_counted(post, frames):
    before = post.inbox.dropped
    messages = post.received(*frames)
    assert post.inbox.dropped - before + len(messages) == len(frames)
    # Compare encodings, because a mutated float may be NaN.
    assert [encode(message) for message in messages] == [encode(each) for each in map(read, frames) if each]


def test_dropped_content_is_not_logged(post, caplog):
    caplog.set_level(logging.DEBUG)
    post.inbox.dropped = 0
    frame = encode({"type": SECRET.decode(), "request_id": SECRET.decode()})
    assert post.received(frame, *[SECRET] * 8) == []
    assert post.inbox.dropped == 9
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4
    assert str(len(frame)) in said[0]
    assert post.inbox.address in said[0]
    assert not any(SECRET.decode() in each for each in said)


def test_an_oversized_frame_closes_its_connection_only(tmp_path):
    post = Post(f"ipc://{tmp_path}/inbox.sock", max_frame_bytes=1000)
    try:
        assert post.received(encode(RESERVE)) == [RESERVE]
        post.raw.send(b"x" * 2000)
        got = []
        for _ in range(1000):
            post.raw.send(encode(RESERVE))
            got += post.inbox.receive(0.1)
            if got:
                break
        assert got[0] == RESERVE
        assert post.inbox.dropped == 0
    finally:
        post.close()


def test_rejects_an_oversized_message_at_the_sender(post, monkeypatch):
    monkeypatch.setattr(mailbox, "MAX_FRAME_BYTES", 10)
    with pytest.raises(ValueError, match="Abort has 25 bytes"):
        post.outbox.send(post.inbox.address, Abort(request_id="r"))


def test_a_generation_round_trips(post):
    generation = Generation(
        request=REQUEST, prompt_token_ids=[1], sampling=SAMPLING, key="alice", priority=-2, deadline_s=12.5
    )
    assert post.received(encode(Prefill(generation=generation))) == [Prefill(generation=generation)]


class GuardedPost:
    """An encrypted inbox with a TCP address, and an outbox that sends to it."""

    def __init__(self, folder):
        self.context, self.lost = zmq.Context(), []
        self.guard = Guard(self.context, ClusterKey(b"\x01" * 32))
        self.inbox = Inbox(
            self.context,
            f"ipc://{folder}/inbox.sock",
            ToWorker,
            guard=self.guard,
            outside="tcp://127.0.0.1:*",
            on_lost=self.lost.append,
        )
        self.outbox = Outbox(self.context, self.guard, "p")
        self.raw = self.context.socket(zmq.PUSH)
        self.guard.call(self.raw, self.inbox.outside)
        self.raw.connect(self.inbox.outside)

    def received(self, count):
        messages = []
        for _ in range(300):
            messages += self.inbox.receive(0.1)
            if len(messages) + self.inbox.dropped >= count:
                break
        return messages

    def close(self):
        self.raw.close(linger=0)
        self.outbox.close()
        self.inbox.close()
        self.guard.close()
        self.context.term()


@pytest.fixture
def guarded(tmp_path):
    made = GuardedPost(tmp_path)
    yield made
    made.close()


def test_an_inbox_receives_over_both_of_its_addresses(guarded):
    for address in (guarded.inbox.address, guarded.inbox.outside):
        guarded.outbox.send(address, LAST)
    assert guarded.received(2) == [LAST, LAST]
    assert guarded.inbox.outside.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("numbers", "gaps"), [([0, 1, 2], 0), ([0, 2], 1), ([1], 1), ([0, 1, 5, 6, 9], 2), ([0, 0], 1)]
)
def test_lost_messages_are_reported_with_their_sender(guarded, numbers, gaps):
    for number in numbers:
        guarded.raw.send_multipart([msgspec.msgpack.encode(Stamp("p", 7, number)), encode(LAST)])
    assert guarded.received(len(numbers)) == [LAST] * len(numbers)
    assert guarded.lost == ["p"] * gaps


def test_a_new_stream_restarts_the_numbering(guarded):
    for stream, number in [(7, 0), (7, 1), (8, 0), (8, 1)]:
        guarded.raw.send_multipart([msgspec.msgpack.encode(Stamp("p", stream, number)), encode(LAST)])
    guarded.received(4)
    assert guarded.lost == []


def test_frames_without_a_valid_stamp_are_dropped(guarded):
    for frames in ([encode(LAST)], [b"", encode(LAST)], [b"x", encode(LAST)], [b"x", b"y", encode(LAST)]):
        guarded.raw.send_multipart(frames)
    assert guarded.received(4) == []
    assert guarded.inbox.dropped == 4


def test_a_connection_that_another_server_broke_is_opened_again(guarded, tmp_path):
    """ZeroMQ itself never reconnects after an answer in another protocol."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        guarded.outbox.send(address, LAST)
        connection, _ = other.accept()
        with connection, suppress(ConnectionResetError):
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(200))
            while connection.recv(4096):
                pass
    guarded.inbox.close()
    options = {"guard": guarded.guard, "outside": address, "on_lost": guarded.lost.append}
    guarded.inbox = Inbox(guarded.context, f"ipc://{tmp_path}/again.sock", ToWorker, **options)
    came = []
    for _ in range(300):
        guarded.outbox.send(address, LAST)
        came += guarded.inbox.receive(0.1)
        if came:
            break
    assert came[0] == LAST
    assert guarded.lost == ["p"]


def test_a_broadcast_message_is_encoded_once_and_delivered_unchanged(tmp_path):
    with zmq.Context() as context:
        inboxes = [Inbox(context, f"ipc://{tmp_path}/{name}.sock", ToWorker) for name in "abc"]
        outbox = Outbox(context)
        for message in (RESERVE, Abort(request_id="r"), Abort(request_id="r")):
            for inbox in inboxes:
                outbox.send(inbox.address, message)
        for inbox in inboxes:
            came = []
            while len(came) < 3:
                came += inbox.receive(60)
            assert came == [RESERVE, Abort(request_id="r"), Abort(request_id="r")]
            inbox.close()
        outbox.close()


def test_more_sockets_than_zeromqs_default_limit(tmp_path):
    context = new_context()
    outbox = Outbox(context)
    inbox = Inbox(context, f"ipc://{tmp_path}/1099.sock", ToWorker)
    for number in range(1_100):
        outbox.send(f"ipc://{tmp_path}/{number}.sock", LAST)
    assert list(inbox.receive(60)) == [LAST]
    inbox.close()
    outbox.close()
    context.destroy(linger=0)
