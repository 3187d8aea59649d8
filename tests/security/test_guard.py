"""Authentication of ZeroMQ sockets by the cluster key."""

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
    """Server socket that accepts only clients with the cluster key."""

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
        """Return whether the guard rejects the client."""
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
    """Yield a client socket."""
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    yield socket
    socket.close()
    context.term()


def test_accepts_the_cluster_key(door):
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


def test_refuses_clients_without_a_key(door, caller, caplog):
    caller.connect(door.address)
    caller.send(b"hello")
    assert door.refuses()
    assert "refused a connection" in caplog.text
    assert "hello" not in caplog.text


def test_refuses_another_key(door):
    with zmq.Context() as context:
        guard = Guard(context, THEIRS)
        socket = context.socket(zmq.PUSH)
        guard.call(socket, door.address)
        socket.connect(door.address)
        socket.send(b"hello")
        assert door.refuses()
        socket.close(linger=0)
        guard.close()


def test_refuses_clients_that_know_only_the_public_key(door, caller, caplog):
    caller.curve_publickey, caller.curve_secretkey = zmq.curve_keypair()
    caller.curve_serverkey = zmq.curve_public(z85.encode(OURS.server_secret))
    caller.connect(door.address)
    caller.send(b"hello")
    assert door.refuses()
    assert "refused a connection from 127.0.0.1" in caplog.text


def test_admits_no_client_without_an_authenticator(caller):
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


def test_ignores_other_protocols(door):
    host, port = door.address.removeprefix("tcp://").split(":")
    with sockets.create_connection((host, int(port))) as line:
        line.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert not door.socket.poll(1000)


def test_logs_refusals_at_powers_of_two(door, caller, caplog):
    caplog.set_level(logging.WARNING)
    for number in range(20):
        door.guard._refuse("from somebody", "no reason")
        assert door.guard.refused == number + 1
    assert len(caplog.records) == 5
