"""Messages between ranks, and layer-by-layer progress of a prefill that several ranks compute."""

import pickle
from multiprocessing import Pipe

import msgspec
import pytest

from twofold.engine.rank_link import LayerProgress, TypedPipe


def test_a_layer_waits_for_all_ranks_and_earlier_layers():
    """A layer is reported once all ranks have computed it and every earlier layer has been reported."""
    said = []
    progress = LayerProgress(3, 2, said.append)
    progress.computed(0)
    progress.computed(1)
    progress.computed(1)
    assert said == []
    progress.computed(0)
    assert said == [0, 1]
    progress.computed(2)
    assert said == [0, 1]
    progress.finish()
    assert said == [0, 1, 2]
    progress.computed(2)
    assert said == [0, 1, 2], "what is heard later changes nothing"


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
