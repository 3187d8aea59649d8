"""A typed pipe decodes only messages of the expected types."""

import pickle
from multiprocessing import Pipe

import msgspec
import pytest

from twofold.engine.typed_pipe import TypedPipe


class Ping(msgspec.Struct, frozen=True, tag=True):
    number: int


class Pong(msgspec.Struct, frozen=True, tag=True):
    words: tuple[str, ...]


@pytest.fixture
def ends():
    ours, theirs = Pipe()
    with ours, theirs:
        yield TypedPipe(ours, Ping | Pong), TypedPipe(theirs, Ping | Pong)


def test_messages_arrive_in_order_with_their_types(ends):
    ours, theirs = ends
    ours.send(Ping(3))
    ours.send(Pong(("a", "b")))
    assert theirs.connection.poll(1.0)
    assert [theirs.recv(), theirs.recv()] == [Ping(3), Pong(("a", "b"))]
    assert not theirs.connection.poll(0.0)


def test_rejects_pickles(ends):
    ours, theirs = ends
    ours.connection.send_bytes(pickle.dumps(Ping(3)))
    with pytest.raises(msgspec.MsgspecError):
        theirs.recv()


def test_a_closed_end_raises_eof(ends):
    ours, theirs = ends
    ours.connection.close()
    with pytest.raises(EOFError):
        theirs.recv()
