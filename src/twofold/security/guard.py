"""CURVE sockets of a ZeroMQ context, and authentication of peers by the cluster key."""

import hmac
import logging
import threading

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from twofold.security.key import ClusterKey

log = logging.getLogger(__name__)

ENCRYPTION_BYTES = 256  # overhead of CURVE per frame
_ZAP = "inproc://zeromq.zap.01"  # ZeroMQ's authentication endpoint (RFC 27)
_DOMAIN = b"twofold"
_LOOK_MS = 200
# A connection silent for this time is dropped and reopened; heartbeats are sent at half this interval.
_DEAD_MS = 6000
_CALL_MS = 2000
# Handshakes that failed before authentication: no key, or no ZeroMQ peer.
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


class Guard:
    """CURVE encryption of a ZeroMQ context's sockets, and authentication of peers by the cluster key."""

    def __init__(self, context: Context, key: ClusterKey) -> None:
        self._context = context
        self._server_secret, self._client_secret = (z85.encode(key.server_secret), z85.encode(key.client_secret))
        self._server_public, self._client_public = map(zmq.curve_public, (self._server_secret, self._client_secret))
        self._zap = context.socket(zmq.REP)
        self._zap.bind(_ZAP)
        self._monitors: list[Socket] = []
        self._closing = threading.Event()
        self.refused = 0  # connections; logged when the count is a power of two
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)
        self._thread.start()

    def listen(self, socket: Socket, address: str, *, bulk: bool = False) -> None:
        """Require the cluster key from clients of `socket`. Call this before binding `socket` to `address`."""
        socket.curve_secretkey = self._server_secret
        socket.curve_server = True
        socket.zap_domain = _DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # reject connections while no authenticator runs
        _set_up(socket, address, bulk=bulk)
        self._monitors.append(socket.get_monitor_socket(_FAILED))

    def call(self, socket: Socket, address: str, *, bulk: bool = False) -> None:
        """Configure `socket`, before it connects, to authenticate to a server with the cluster key."""
        socket.curve_secretkey, socket.curve_publickey = self._client_secret, self._client_public
        socket.curve_serverkey = self._server_public
        _set_up(socket, address, bulk=bulk)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CALL_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)

    def close(self) -> None:
        """Stop accepting connections. Call this before closing the ZeroMQ context."""
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
                    self._refuse(f"to {endpoint.decode()}", "missing or wrong cluster key")

    def _answer(self, request: list[bytes]) -> None:
        """Answer a ZAP request: accept the client if it has the cluster key, else refuse it."""
        version, number, domain, address, _, mechanism, *credentials = request
        known = [domain, mechanism] == [_DOMAIN, b"CURVE"] and len(credentials) == 1
        admitted = known and hmac.compare_digest(z85.encode(credentials[0]), self._client_public)
        if not admitted:
            self._refuse(f"from {address.decode()}", "wrong cluster key")
        status = [b"200", b"OK"] if admitted else [b"400", b"wrong key"]
        self._zap.send_multipart([version, number, *status, b"", b""])

    def _refuse(self, which: str, why: str) -> None:
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:
            log.warning("refused a connection %s: %s; %d so far", which, why, self.refused)


def _set_up(socket: Socket, address: str, *, bulk: bool) -> None:
    if "[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _CALL_MS)
    if bulk:  # no heartbeats: large messages would delay them
        return
    socket.setsockopt(zmq.HEARTBEAT_IVL, _DEAD_MS // 2)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _DEAD_MS // 2)
