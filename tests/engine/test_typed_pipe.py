"""Processes of one worker hear what they expect, and nothing else."""

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


def test_messages_arrive_as_they_were_sent(ends):
    """Each as its own type, in order."""
    ours, theirs = ends
    ours.send(Ping(3))
    ours.send(Pong(("a", "b")))
    assert theirs.poll(1.0)
    assert [theirs.recv(), theirs.recv()] == [Ping(3), Pong(("a", "b"))]
    assert not theirs.poll(0.0)


def test_pickles_are_not_opened(ends):
    """Whatever is in them."""
    ours, theirs = ends
    ours.connection.send_bytes(pickle.dumps(Ping(3)))
    with pytest.raises(msgspec.MsgspecError):
        theirs.recv()


def test_an_end_that_is_closed_is_noticed(ends):
    """As the end of a process is."""
    ours, theirs = ends
    ours.connection.close()
    with pytest.raises(EOFError):
        theirs.recv()
