"""The guard of a ZeroMQ context: its CURVE sockets speak only with those who have the cluster key."""

import hmac
import logging
import threading

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from twofold.security.key import ClusterKey

log = logging.getLogger(__name__)

ENCRYPTION_BYTES = 256  # room for what CURVE puts around a frame
_ZAP = "inproc://zeromq.zap.01"  # where ZeroMQ looks for who decides (RFC 27)
_DOMAIN = b"twofold"
_LOOK_MS = 200
# A connection that carries nothing for so long is dropped and made anew; half of it is how often both ends ask.
_DEAD_MS = 6000
_CALL_MS = 2000
# Those that ended before ZeroMQ asked about a key: they had none, or were not even ZeroMQ.
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

Socket = zmq.Socket[bytes]


class Guard:
    """Makes sockets of one context CURVE sockets, and decides who is let in.

    A refused connection is noted in the log: of a flood, every power of two. `refused` counts them.
    """

    def __init__(self, context: zmq.Context[Socket], key: ClusterKey) -> None:
        self._context = context
        self._server_secret, self._client_secret = (
            z85.encode(key.server_secret),
            z85.encode(key.client_secret),
        )
        self._server_public, self._client_public = map(
            zmq.curve_public, (self._server_secret, self._client_secret)
        )
        self._zap = context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._monitors: list[Socket] = []
        self._closing = threading.Event()
        self.refused = 0
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)
        self._thread.start()

    def listen(self, socket: Socket, address: str, *, bulk: bool = False) -> None:
        """To be called before `socket` is bound to `address`: it takes only those who have the key.

        Silence on a connection ends it, except where it is for `bulk`: behind that, a sign of life may take long.
        """
        socket.curve_secretkey = self._server_secret
        socket.curve_server = True
        socket.zap_domain = _DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody gets in when nobody decides
        _set_up(socket, address, bulk=bulk)
        self._monitors.append(socket.get_monitor_socket(_FAILED))

    def call(self, socket: Socket, address: str, *, bulk: bool = False) -> None:
        """To be called before `socket` is connected: it shows the key, and speaks only with one who has it."""
        socket.curve_secretkey, socket.curve_publickey = self._client_secret, self._client_public
        socket.curve_serverkey = self._server_public
        _set_up(socket, address, bulk=bulk)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CALL_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)

    def close(self) -> None:
        """To be called when nobody is to be let in any more, and before the context ends."""
        self._closing.set()
        self._thread.join()
        for socket in (self._zap, *self._monitors):
            socket.close(linger=0)

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._zap.poll(_LOOK_MS):
                self._answer(self._zap.recv_multipart())
            for monitor in list(self._monitors):
                while monitor.poll(0):
                    endpoint = recv_monitor_message(monitor)["endpoint"]
                    self._refuse(f"to {endpoint.decode()}", "it has no cluster key, or another one")

    def _answer(self, request: list[bytes]) -> None:
        """A ZAP request is: version, number, domain, address, identity, mechanism, the caller's public key."""
        version, number, domain, address, _, mechanism, *credentials = request
        known = [domain, mechanism] == [_DOMAIN, b"CURVE"] and len(credentials) == 1
        admitted = known and hmac.compare_digest(z85.encode(credentials[0]), self._client_public)
        if not admitted:
            self._refuse(f"from {address.decode()}", "it has another cluster key")
        status = [b"200", b"OK"] if admitted else [b"400", b"another key"]
        self._zap.send_multipart([version, number, *status, b"", b""])

    def _refuse(self, which: str, why: str) -> None:
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:
            log.warning("refused a connection %s: %s; %d so far", which, why, self.refused)


def _set_up(socket: Socket, address: str, *, bulk: bool) -> None:
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _CALL_MS)
    if bulk:
        return
    socket.setsockopt(zmq.HEARTBEAT_IVL, _DEAD_MS // 2)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD_MS // 2)
