"""A KV cache in another process, for tests of transports."""

import multiprocessing
import os
import signal
from contextlib import contextmanager

import torch

from support.device import DEVICE
from twofold.handoff import Lease
from twofold.security.network import HostNetwork
from twofold.transport.base import KvCacheSpec
from twofold.transport.pooled import load_transport


class CachePeer:
    """Proxy of a `Cache` in another process."""

    def __init__(self, name, key=None):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_obey, args=(name, key, theirs), daemon=True)
        self.process.start()

    def do(self, what, *arguments):
        self._pipe.send((what, arguments))
        return self._pipe.recv()

    def stop(self):
        """Suspend the process."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def kill(self):
        self.process.kill()
        self.process.join()


class Cache:
    """KV cache of one process, with a KV transport and connections to peers."""

    def __init__(self, name, key=None, host=None):
        self.name, self.network = name, None
        self.transport, self.connections = None, []
        if key is not None:
            self.network = HostNetwork(
                host=host or name, address="127.0.0.1", key_file=str(key), controller="tcp://127.0.0.1:1"
            )

    def make(self, transport, epoch, layout, num_blocks, everything=True):
        """Create the transport of this cache and return the transport's descriptor."""
        make = load_transport(transport)
        self.transport = make(KvCacheSpec(self.name, epoch, layout, num_blocks, DEVICE, self.network))
        if everything:
            for peer in ("prefill", "decode"):
                self.grant(lease(self.name, epoch, peer, range(num_blocks)))
        return self.transport.descriptor

    def connect(self, peer):
        """Connect to a peer; the connection stays open until the cache is closed."""
        self.connections.append(self.transport.connect(peer))
        return self.connections[-1]

    def close(self):
        for connection in self.connections:
            connection.close()
        if self.transport is not None:
            self.transport.close()

    def grant(self, granted):
        self.transport.granted(granted)

    def revoke(self, ended):
        self.transport.ended(ended)

    def fill(self, seed):
        """Fill all blocks with random bytes that depend only on the seed and the layout."""
        torch.manual_seed(seed)
        for layer in range(len(self.transport.engine_pool.layout.layers)):
            for part in self.transport.engine_pool.block_rows(layer):
                part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8))
        self.transport.publish(range(self.transport.engine_pool.num_blocks))

    def rows(self):
        """Return the KV blocks of each layer as bytes."""
        pool = self.transport.landing_pool
        return [torch.cat(pool.block_rows(k), dim=1).cpu().numpy().copy() for k in range(len(pool.layout.layers))]


def lease(instance, epoch, source, blocks):
    return Lease(request_id="r", source=source, instance=instance, epoch=epoch, blocks=tuple(blocks), deadline_s=0.0)


def _obey(name, key, pipe):
    torch.set_num_threads(1)
    cache = Cache(name, key)
    while True:
        what, arguments = pipe.recv()
        if what == "end":
            os._exit(0)
        pipe.send(getattr(cache, what)(*arguments))


@contextmanager
def cache_peer(name, key=None):
    peer = CachePeer(name, key)
    try:
        yield peer
    finally:
        peer.kill()
