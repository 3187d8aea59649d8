"""Who is let in at a socket, and who is not."""

import logging
import socket as sockets

import pytest
import zmq
from zmq.utils import z85

from twofold.security.guard import Guard
from twofold.security.key import ClusterKey

OURS, THEIRS = ClusterKey(b"\x01" * 32), ClusterKey(b"\x02" * 32)
LOOKS = 150


class Door:
    """A guarded socket; `heard` tells what came through it."""

    def __init__(self):
        self.context = zmq.Context()
        self.guard = Guard(self.context, OURS)
        self.socket = self.context.socket(zmq.PULL)
        self.guard.listen(self.socket, "tcp://127.0.0.1:*")
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")

    def heard(self):
        return [self.socket.recv()] if self.socket.poll(20_000) else []

    def refuses(self):
        """Whether it refuses somebody, and hears nothing of what is said."""
        for _ in range(LOOKS):
            if self.guard.refused:
                return not self.socket.poll(200)
            self.socket.poll(100)
        return False


@pytest.fixture
def door():
    made = Door()
    yield made
    made.socket.close(linger=0)
    made.guard.close()
    made.context.term()


@pytest.fixture
def caller():
    """A socket of another process, as it were."""
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    yield socket
    socket.close()
    context.term()


def test_who_has_the_key_is_heard(door):
    """Over TCP, in another context."""
    with zmq.Context() as context:
        guard = Guard(context, OURS)
        socket = context.socket(zmq.PUSH)
        guard.call(socket, door.address)
        socket.connect(door.address)
        socket.send(b"hello")
        assert door.heard() == [b"hello"]
        assert door.guard.refused == 0
        socket.close(linger=0)
        guard.close()


def test_who_has_none_is_not(door, caller, caplog):
    """It is noted, without what was said."""
    caller.connect(door.address)
    caller.send(b"hello")
    assert door.refuses()
    assert "refused a connection" in caplog.text
    assert "hello" not in caplog.text


def test_who_has_another_is_not(door):
    """It does not get as far as showing it."""
    with zmq.Context() as context:
        guard = Guard(context, THEIRS)
        socket = context.socket(zmq.PUSH)
        guard.call(socket, door.address)
        socket.connect(door.address)
        socket.send(b"hello")
        assert door.refuses()
        socket.close(linger=0)
        guard.close()


def test_who_knows_the_public_key_only_is_not(door, caller, caplog):
    """Public keys are no secrets, so the caller's own key is asked for too."""
    caller.curve_publickey, caller.curve_secretkey = zmq.curve_keypair()
    caller.curve_serverkey = zmq.curve_public(z85.encode(OURS.server_secret))
    caller.connect(door.address)
    caller.send(b"hello")
    assert door.refuses()
    assert "refused a connection from 127.0.0.1" in caplog.text


def test_without_a_guard_that_answers_nobody_is_let_in(caller):
    """A door that nobody watches stays shut."""
    door = Door()
    door.guard.close()
    with zmq.Context() as context:
        guard = Guard(context, OURS)
        socket = context.socket(zmq.PUSH)
        guard.call(socket, door.address)
        socket.connect(door.address)
        socket.send(b"hello")
        assert not door.socket.poll(1000)
        socket.close(linger=0)
        guard.close()
    door.socket.close(linger=0)
    door.context.term()


def test_what_does_not_even_speak_the_protocol_is_not_heard(door):
    """A browser, or somebody who tries ports."""
    host, port = door.address.removeprefix("tcp://").split(":")
    with sockets.create_connection((host, int(port))) as line:
        line.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert not door.socket.poll(1000)


def test_of_a_flood_not_every_drop_is_noted(door, caller, caplog):
    """A log that fills a disk would be a way in, too."""
    caplog.set_level(logging.WARNING)
    for number in range(20):
        door.guard._refuse("from somebody", "no reason")
        assert door.guard.refused == number + 1
    assert len(caplog.records) == 5
